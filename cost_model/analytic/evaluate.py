"""Evaluates a parallel strategy for a described model: memory of every stage, and step time by simulating the schedule.

Both the planner's strategies, whose stages may be unequal, and a job's (`predict`), whose stages are equal, are
evaluated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from cost_model.analytic import sharded
from cost_model.analytic.layer_costs import Model, costs_of
from cost_model.analytic.stacks import Stack, curve_of
from cost_model.analytic.stage_cache import StageCosts
from cost_model.analytic.stage_costs import StageCost, fully_sharded
from cost_model.cluster.pools import Machines
from cost_model.hardware import Device
from cost_model.kernels.collectives import all_reduce_s
from cost_model.kernels.interval import UNKNOWN, compute_interval_s
from cost_model.simulator import Tasks, Timeline, pipeline_tasks, simulate
from whale.errors import PlanError
from whale.ir.pipeline_schedule import Schedule, make_schedule
from whale.ir.prediction import Prediction, RankPrediction
from whale.ir.strategy import DeviceGroup, ParallelStrategy
from whale_ops.pipeline import play_pipeline

SCHEDULES = ("1f1b", "gpipe")  # those that do not split a backward pass into two, as zero-bubble schedules do


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Holds the predicted time and memory of one training step under a strategy.

    Attributes:
        step_s: seconds of the whole step.
        compute_s: seconds of the busiest stage's forward and backward passes, all micro-batches, with the collectives
            inside them that no kernel hides, but without its sends.
        send_s: seconds in which the busiest stage sends activations and gradients to neighbouring stages.
        bubble_s: seconds in which the busiest stage is idle before the last pass of any stage ends.
        reduce_s: seconds of gradient reduction after the last pass, `tied_s` included.
        update_s: seconds of the optimizer and of the software's fixed work once per step (`Stack.step_ms`).
        lacking_bytes: bytes by which the memory of the worst rank is too small; zero or negative if the step fits.
        stages: the cost of each stage.
        busiest: index of the stage whose passes take longest.
        passes_s: seconds from the start of the step until the last forward or backward pass ends.
        tied_s: seconds to sum the gradients of weights that the first and the last stage share.
    """

    step_s: float
    compute_s: float
    send_s: float
    bubble_s: float
    reduce_s: float
    update_s: float
    lacking_bytes: float
    stages: tuple[StageCost, ...]
    busiest: int
    passes_s: float
    tied_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Returns True if the step fits into the memory of all ranks."""
        return self.lacking_bytes <= 0


def evaluate(
    model: Model,
    machines: Machines,
    strategy: ParallelStrategy,
    stage_costs: StageCosts | None = None,
) -> Evaluation:
    """Predicts the time and memory of one training step under a strategy by simulating its schedule.

    Args:
        stage_costs: cache of stage costs that a search shares between calls, for this model on these machines; None:
            costs are computed anew.

    Raises:
        PlanError: the schedule splits backward passes, or does not support this number of chunks or micro-batches.
    """
    stages, count = len(strategy.stages), strategy.micro_batches
    stage_costs = stage_costs or StageCosts(model, machines)
    costs = stage_costs.list_costs(strategy)
    if fully_sharded(model, strategy):
        costs, ends = _simulate_sharded(model, machines, strategy, costs)
    elif strategy.schedule == "1f1b":
        ends = play_pipeline([c.forward_s for c in costs], [c.backward_s for c in costs], count)
    else:
        orders = _orders(strategy)
        timeline = simulate(_tasks(orders, costs))
        ends = [timeline.end_s[length - 1] for length in accumulate(len(order) for order in orders)]
    ready_s = max(end + one.reduce_s for end, one in zip(ends, costs))
    shared_s = tied_s(model, machines, strategy)
    ready_s += shared_s
    update_s = max(one.update_s for one in costs)
    step_s = ready_s + update_s + model.stack.step_ms * 1e-3
    busy = [count * (sum(one.forward_s) + sum(one.backward_s)) for one in costs]
    if stages == 1:
        busy = ends  # there is nobody to wait for
    busiest = max(range(stages), key=lambda s: busy[s])
    sent_s = count * costs[busiest].send_s
    return Evaluation(
        step_s=step_s,
        compute_s=busy[busiest] - sent_s,
        send_s=sent_s,
        bubble_s=max(ends) - busy[busiest],
        reduce_s=ready_s - max(ends),
        update_s=step_s - ready_s,
        lacking_bytes=max(one.lacking_bytes for one in costs),
        stages=tuple(costs),
        busiest=busiest,
        passes_s=max(ends),
        tied_s=shared_s,
    )


def prediction_of(found: Evaluation, strategy: ParallelStrategy, machines: Machines, stack: Stack) -> Prediction:
    """Converts an `Evaluation` into a `Prediction`, the form in which all cost models report a step.

    Each entry of `Prediction.ranks` stands for the equal ranks of one stage on one pool of devices.
    """
    ranks = []
    for index, (stage, cost) in enumerate(zip(strategy.stages, found.stages)):
        sent_s = strategy.micro_batches * cost.send_s
        passes_s = strategy.micro_batches * (sum(cost.forward_s) + sum(cost.backward_s))
        for part, used in zip(stage.parts, cost.memory):
            pool = machines.pools[part.pool]
            held = used.parameters_bytes + used.gradients_bytes + used.optimizer_bytes
            ranks.append(
                RankPrediction(
                    end_s=found.step_s,
                    compute_s=passes_s - sent_s + cost.update_s,
                    exchange_s=sent_s + cost.reduce_s,
                    peak_bytes=round(used.total_bytes),
                    resident_bytes=round(held),
                    limit_bytes=round(pool.memory_bytes),
                    count=part.ranks,
                    name=f"stage {index} on {pool.name}",
                )
            )
    return Prediction(
        where=machines.cluster.name,
        step_s=found.step_s,
        ranks=tuple(ranks),
        likely_s=likely_s(stack, strategy, machines, found.step_s),
        compute_s=found.compute_s,
        communication_s=found.send_s + found.reduce_s,
        bubble_s=found.bubble_s,
        update_s=found.update_s,
        lacking_bytes=found.lacking_bytes,
    )


def not_compared(stack: Stack, strategy: ParallelStrategy, machines: Machines) -> list[str]:
    """Returns names of the strategy's devices on which the stack was never compared with a published measurement.

    An empty list means that the prediction's error is known for these devices (see `likely_s`).
    """
    used = _used(strategy, machines)
    if curve_of(used) in stack.compared:
        return []
    return sorted({device.name for device in used if device.efficiency not in stack.compared})


def _used(strategy: ParallelStrategy, machines: Machines) -> list[Device]:
    pools = {part.pool for stage in strategy.stages for part in stage.parts}
    return [machines.pools[number].device for number in sorted(pools)]


def likely_s(stack: Stack, strategy: ParallelStrategy, machines: Machines, step_s: float) -> tuple[float, float]:
    """Returns (low, high) in seconds: nine of ten measured steps lie between them if `step_s` is predicted.

    The interval comes from published steps under the same stack and devices; it is wide where there are none.
    """
    if not_compared(stack, strategy, machines):
        return compute_interval_s(step_s, UNKNOWN)
    used = _used(strategy, machines)
    whole = stack.compared.get(curve_of(used))
    each = [whole] if whole else [stack.compared[device.efficiency] for device in used]
    return compute_interval_s(step_s, (min(one.low for one in each), max(one.high for one in each)))


def _simulate_sharded(
    model: Model, machines: Machines, strategy: ParallelStrategy, costs: Sequence[StageCost]
) -> tuple[list[StageCost], list[float]]:
    """Simulates layer by layer the passes of a single stage under fully sharded data parallelism (ZeRO 2 or 3).

    Gradients are reduce-scattered during the passes, so the returned cost has `reduce_s` = 0.

    Returns:
        ([cost of the stage with these passes], [seconds at which its passes have ended]).
    """
    found = sharded.passes(model, machines, strategy)
    cost = msgspec.structs.replace(costs[0], forward_s=(found.forward_s,), backward_s=(found.backward_s,), reduce_s=0.0)
    return [cost], [found.passes_s]


def kernels_s(model: Model, machines: Machines, strategy: ParallelStrategy, found: Evaluation) -> float:
    """Returns the seconds in which the busiest stage runs kernels: `Evaluation.compute_s` without exposed
    communication.
    """
    if fully_sharded(model, strategy):
        return sharded.passes(model, machines, strategy).compute_s
    stage = strategy.stages[found.busiest]
    costs = [costs_of(model, strategy, part, strategy.ranks, stage.replicas, stage.recompute) for part in stage.parts]
    each_s = 0.0
    for low, high in stage.layers:
        ahead = max(costs, key=lambda one: one.forward(low, high))
        back = max(costs, key=lambda one: one.backward(low, high))
        each_s += ahead.kernels(low, high)[0] + back.kernels(low, high)[1]
    return strategy.micro_batches * each_s


def simulate_passes(strategy: ParallelStrategy, found: Evaluation) -> tuple[Tasks, Timeline]:
    """Simulates every forward and backward pass of a step; returns the passes as tasks, and their start and end times.

    Tasks are sorted by stage, and within a stage by the order of its schedule.
    """
    tasks = _tasks(_orders(strategy), found.stages)
    return tasks, simulate(tasks)


def _orders(strategy: ParallelStrategy) -> Schedule:
    if strategy.schedule not in SCHEDULES:
        raise PlanError(
            "the cost model cannot predict a pipeline schedule that splits backward passes in two",
            given=f"schedule={strategy.schedule}",
            expected=" or ".join(SCHEDULES),
            action="choose another schedule for the plan",
        )
    return make_schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)


def _tasks(orders: Schedule, costs: Sequence[StageCost]) -> Tasks:
    """Creates one simulator task per forward or backward pass, on the stream of its stage, in the order of the
    schedule.
    """
    held = [c.held_bytes for c in costs]
    return pipeline_tasks(orders, [c.forward_s for c in costs], [c.backward_s for c in costs], held)


def tied_s(model: Model, machines: Machines, strategy: ParallelStrategy) -> float:
    """Returns the seconds to all-reduce gradients of weights that the first and the last stage both hold (tied
    embedding).

    0 with a single stage, or if the model shares no weights.
    """
    stages = strategy.stages
    if len(stages) == 1 or not model.tied_parameters:
        return 0.0
    between = stages[0].ranks * (len(stages) - 1)
    return tied_between_s(model, machines, stages[0].parts[0], stages[-1].parts[0], between)


def tied_between_s(model: Model, machines: Machines, first: DeviceGroup, last: DeviceGroup, between: int) -> float:
    """Returns the seconds to all-reduce the gradients of tied weights between a rank of the first and one of the last
    stage.

    Args:
        first, last: the first device groups of both stages.
        between: distance of the two ranks in the numbering of ranks, which tells whether they are on one host.
    """
    pool = machines.pools[first.pool]
    apart = first.pool != last.pool or between >= pool.host_devices
    tied_bytes = model.stack.gradient_bytes * model.tied_parameters / min(first.tensor, last.tensor)
    return all_reduce_s(machines.pair(first.pool, last.pool, apart), tied_bytes)
