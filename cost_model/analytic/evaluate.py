"""Evaluates a strategy: memory of every stage, and the step's time, by simulating its schedule.

Every step of a described model is evaluated here: with the planner's unequal stages, and with the
equal ones of a job, whose prediction (`predict`) is a special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cost_model.analytic import sharded
from cost_model.analytic.layer_costs import Model, costs_of
from cost_model.analytic.stacks import Stack, curve_of
from cost_model.analytic.stage_cache import StageCosts
from cost_model.analytic.stage_costs import StageCost, fully_sharded
from cost_model.cluster.pools import Machines
from cost_model.hardware import Device
from cost_model.kernels.collectives import all_reduce_s
from cost_model.kernels.interval import UNKNOWN, compute_interval_s
from cost_model.simulator import (
    Tasks,
    Timeline,
    interleaved_ends_s,
    one_f_one_b_ends_s,
    pipeline_tasks,
    simulate,
)
from whale.errors import PlanError
from whale.ir.pipeline_schedule import Schedule, make_schedule
from whale.ir.prediction import Prediction, RankPrediction
from whale.ir.strategy import DeviceGroup, ParallelStrategy, count_live_chunks

SCHEDULES = ("1f1b", "gpipe")  # of whole backward passes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A strategy's predicted step.

    Attributes:
        step_s: the whole step; compute_s, send_s, bubble_s: of the busiest stage; reduce_s, update_s: after the
            last pass.
        tied_s: part of `reduce_s`, to sum the gradients of weights that the first and the last stage share.
        lacking_bytes: by how much the worst rank's memory is too small; not positive: it fits.
        passes_s: until the last pass of all stages ends.
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
        """Tells whether the step fits into the memory of all ranks."""
        return self.lacking_bytes <= 0


def evaluate(
    model: Model,
    machines: Machines,
    strategy: ParallelStrategy,
    stage_costs: StageCosts | None = None,
    ends: list[float] | None = None,
) -> Evaluation:
    """Simulates one step of a strategy.

    Args:
        stage_costs: a search's cache of costs of stages of this model on these machines.
        ends: when each stage's last pass ends, where that is known (see `evaluate_many`).

    Raises:
        PlanError: the schedule splits backward passes, or does not support so many chunks or micro-batches.
    """
    stages, count, ranks = len(strategy.stages), strategy.micro_batches, strategy.ranks
    stage_costs = stage_costs or StageCosts(model, machines)
    costs = [stage_costs(strategy, i, count_live(strategy, i), ranks) for i in range(stages)]
    if ends is not None:
        pass
    elif fully_sharded(model, strategy):
        costs, ends = _simulate_sharded(model, machines, strategy, costs)
    elif strategy.schedule == "1f1b" and strategy.chunks == 1:
        ends = one_f_one_b_ends_s([c.forward_s[0] for c in costs], [c.backward_s[0] for c in costs], count)
    elif strategy.schedule == "1f1b":
        ends = interleaved_ends_s([c.forward_s for c in costs], [c.backward_s for c in costs], count)
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
    """Returns an evaluation as any evaluator tells it, with the devices of each stage and pool as one entry."""
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
    """Returns the devices of a strategy on which no published step under the stack was compared with a prediction."""
    used = _used(strategy, machines)
    if curve_of(used) in stack.compared:
        return []
    return sorted({device.name for device in used if device.efficiency not in stack.compared})


def _used(strategy: ParallelStrategy, machines: Machines) -> list[Device]:
    pools = {part.pool for stage in strategy.stages for part in stage.parts}
    return [machines.pools[number].device for number in sorted(pools)]


def likely_s(stack: Stack, strategy: ParallelStrategy, machines: Machines, step_s: float) -> tuple[float, float]:
    """Returns the seconds between which nine of ten steps lie that are predicted to take `step_s` on these machines.

    They are far apart for a stack on devices on which nothing was compared.
    """
    if not_compared(stack, strategy, machines):
        return compute_interval_s(step_s, UNKNOWN)
    used = _used(strategy, machines)
    whole = stack.compared.get(curve_of(used))
    each = [whole] if whole else [stack.compared[device.efficiency] for device in used]
    return compute_interval_s(step_s, (min(one.low for one in each), max(one.high for one in each)))


def count_live(strategy: ParallelStrategy, index: int) -> int:
    """Returns the number of micro-batch chunks whose activations a stage keeps at its peak."""
    return count_live_chunks(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches, index)


def _simulate_sharded(
    model: Model, machines: Machines, strategy: ParallelStrategy, costs: Sequence[StageCost]
) -> tuple[list[StageCost], list[float]]:
    """Simulates a fully sharded stage's passes layer by layer; no reduction is left after them.

    Returns:
        (the stage's cost with these passes, the time when they have ended).
    """
    found = sharded.passes(model, machines, strategy)
    cost = replace(costs[0], forward_s=(found.forward_s,), backward_s=(found.backward_s,), reduce_s=0.0)
    return [cost], [found.passes_s]


def kernels_s(model: Model, machines: Machines, strategy: ParallelStrategy, found: Evaluation) -> float:
    """Returns the part of `compute_s` in which the busiest stage's kernels run, without exposed communication."""
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
    """Returns every pass of a strategy's step, by stage in the order of its schedule, with its start and end."""
    tasks = _tasks(_orders(strategy), found.stages)
    return tasks, simulate(tasks)


def _orders(strategy: ParallelStrategy) -> Schedule:
    if strategy.schedule not in SCHEDULES:
        raise PlanError(
            "steps of described models are predicted for whole backward passes only",
            given=strategy.schedule,
            expected=" or ".join(SCHEDULES),
        )
    return make_schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)


def _tasks(orders: Schedule, costs: Sequence[StageCost]) -> Tasks:
    """Creates one task per pass on its stage's stream, in the order of the schedule."""
    held = [c.held_bytes for c in costs]
    return pipeline_tasks(orders, [c.forward_s for c in costs], [c.backward_s for c in costs], held)


def tied_s(model: Model, machines: Machines, strategy: ParallelStrategy) -> float:
    """Returns the seconds to sum the gradients of the weights that the first and the last stage share."""
    stages = strategy.stages
    if len(stages) == 1 or not model.tied_parameters:
        return 0.0
    between = stages[0].ranks * (len(stages) - 1)
    return tied_between_s(model, machines, stages[0].parts[0], stages[-1].parts[0], between)


def tied_between_s(model: Model, machines: Machines, first: DeviceGroup, last: DeviceGroup, between: int) -> float:
    """Returns the seconds of `tied_s` for the first parts of both stages, whose ranks are so many apart."""
    pool = machines.pools[first.pool]
    apart = first.pool != last.pool or between >= pool.host_devices
    tied_bytes = model.stack.gradient_bytes * model.tied_parameters / min(first.tensor, last.tensor)
    return all_reduce_s(machines.pair(first.pool, last.pool, apart), tied_bytes)
