"""Predicts step time and memory of a job: a transformer under a software stack, divided evenly over a cluster.

The job's degrees become a strategy with equal stages, which is evaluated like any other (`evaluate`). Ranks that do the
same at the same time (tensor- and data-parallel ones) are simulated once, so the cost of a prediction depends only on
the numbers of stages and micro-batches.

Decision: 0157.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import msgspec

from cost_model.analytic import sharded
from cost_model.analytic.evaluate import Evaluation, evaluate, kernels_s, simulate_passes
from cost_model.analytic.layer_profile import Profile
from cost_model.analytic.memory import Footprint
from cost_model.analytic.stacks import Stack, find_modules
from cost_model.analytic.stage_costs import fully_sharded
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines, list_pool_runs
from cost_model.simulator import Tasks, Timeline, memory_curve, simulate
from whale.errors import PlanError
from whale.ir.strategy import Degrees, DeviceGroup, ParallelStrategy, Stage, divide_chunks, place_chunks


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """Holds the predicted time and memory of a job's step.

    Attributes:
        step_s: seconds of the whole step; the next four add up to it.
        compute_s: seconds in which the busiest stage runs kernels.
        exposed_communication_s: seconds of that stage's communication that no kernel hides, sends included.
        bubble_s: seconds in which that stage waits for others.
        update_s: seconds of gradient reduction and optimizer after the last backward pass.
        strategy: the job's stages on the cluster's pools.
        evaluation: the evaluation of that strategy, stage by stage.
        tasks, timeline: every forward and backward pass with start and end, on its stage's stream. For a fully sharded
            step (`sharded`), the kernels and collectives of the simulated micro-batches, on one stream each.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    bubble_s: float
    update_s: float
    strategy: ParallelStrategy
    evaluation: Evaluation
    tasks: Tasks
    timeline: Timeline

    @property
    def stages(self) -> tuple[Footprint, ...]:
        """Returns each stage's memory footprint: that of its fullest rank."""
        return tuple(max(stage.memory, key=lambda one: one.total_bytes) for stage in self.evaluation.stages)

    @property
    def peak_bytes(self) -> float:
        """Returns the bytes that the fullest of all ranks needs at its peak."""
        return max(stage.total_bytes for stage in self.stages)

    def memory_curve(self, stage: int) -> list[tuple[float, float]]:
        """Returns (seconds since the start, bytes of activations) points of a stage over the step."""
        return memory_curve(self.tasks, self.timeline, [stage])


def predict(
    t: Transformer, p: Degrees, stack: Stack, cluster: Cluster, profile: Profile | None = None
) -> JobPrediction:
    """Predicts one training step of a transformer with equal stages on a cluster.

    Args:
        t: the model.
        p: its parallel degrees, batch and recompute.
        stack: the training software.
        profile: measured layers to use instead of formulas; None: formulas only.

    Raises:
        PlanError: the plan does not fit the model (layers, heads, experts, batch).
        ClusterError: the cluster has too few devices, or one that does not support the stack's dtype.
    """
    _check(t, p, profile)
    if p.selective:
        stack = msgspec.structs.replace(stack, selective=find_modules(p.selective))
    machines = Machines(cluster)
    strategy = even_strategy(t.layers, p, machines, stack.dtype, t.experts > 0)
    model = TransformerModel(t, stack, machines, profile=profile)
    found = evaluate(model, machines, strategy)
    if fully_sharded(model, strategy):
        passes, again = sharded.passes(model, machines, strategy), strategy.zero >= 3
        tasks = sharded.tasks(passes.root, passes.layers, min(sharded.PLAYED, strategy.micro_batches), again)
        timeline = simulate(tasks)
    else:
        tasks, timeline = simulate_passes(strategy, found)
    compute_s = kernels_s(model, machines, strategy, found)
    return JobPrediction(
        step_s=found.step_s,
        compute_s=compute_s,
        exposed_communication_s=max(0.0, found.compute_s + found.send_s - compute_s),
        bubble_s=found.bubble_s,
        update_s=found.reduce_s + found.update_s,
        strategy=strategy,
        evaluation=found,
        tasks=tasks,
        timeline=timeline,
    )


def _check(t: Transformer, p: Degrees, profile: Profile | None) -> None:
    """Raises PlanError if the plan does not fit the model, or needs formulas where a profile is given."""
    if t.heads % p.tensor or t.hidden % p.tensor:
        raise PlanError(
            "the tensor-parallel degree does not divide the number of attention heads or the width `hidden`",
            given=f"{p.tensor} ranks, {t.heads} heads, hidden={t.hidden}",
            expected="a divisor of heads and hidden",
            action="change tensor in the plan",
        )
    if p.experts > 1 and (t.experts % p.experts or p.replicas % p.experts or not t.experts):
        raise PlanError(
            "the expert-parallel degree does not divide the experts of a layer, or the ranks with the same parameters",
            given=f"{p.experts} ranks, {t.experts} experts, {p.replicas} ranks with the same parameters",
            expected="a divisor of a layer's experts and of data x context",
            action="change experts in the plan",
        )
    if t.sequence % p.context:
        raise PlanError(
            "the context-parallel degree does not divide the length of the sequence",
            given=f"{p.context} ranks, {t.sequence} tokens",
            expected=f"a divisor of {t.sequence}",
            action="change context in the plan",
        )
    if sum(p.stage_layers) not in (0, t.layers):
        raise PlanError(
            "the numbers of layers in stage_layers do not add up to the model's layers",
            given=f"{sum(p.stage_layers)} layers",
            expected=f"{t.layers} layers",
            action="change stage_layers in the plan, or leave them out for equal stages",
        )
    if profile and (p.zero >= 2 or p.context > 1):
        raise PlanError(
            "fully sharded data parallelism and context parallelism cannot be predicted from a profile",
            given=f"a profile, zero={p.zero}, context={p.context}",
            expected="zero of 0 or 1, and context of 1",
            action="leave out the profile, so that formulas are used, or change the plan",
        )


def even_strategy(
    layers: int, p: Degrees, machines: Machines, dtype: str, has_experts: bool = False
) -> ParallelStrategy:
    """Converts a job's degrees into a strategy: assigns the devices of a cluster to its equal stages.

    Ranks are numbered with tensor-parallel ranks innermost, then context-, then data-parallel ranks, then stages. A
    tensor-parallel group with devices of several kinds counts as one of the slowest kind.

    Args:
        dtype: dtype of the products, by whose peak the slowest kind is found.
        has_experts: whether the model has experts; else `p.experts` is ignored.

    Raises:
        PlanError: there are more stages than layers.
        ClusterError: the cluster has too few devices.
    """
    runs = list_pool_runs(machines, p.ranks)
    firsts = [first for first, _, _ in runs]

    def slowest(numbers: set[int]) -> int:
        pools = [machines.pools[number] for number in sorted(numbers)]
        return min(pools, key=lambda pool: pool.device.peak_flops_per_s(dtype) * pool.entry.share).number

    stages = []
    ranges = place_chunks(p.stage_layers, p.stages) if p.stage_layers else divide_chunks(layers, p.stages, p.chunks)
    for stage, chunks in enumerate(ranges):
        replicas: dict[int, int] = {}
        for replica in range(stage * p.replicas, (stage + 1) * p.replicas):
            rank = replica * p.tensor
            own = range(bisect_right(firsts, rank) - 1, bisect_right(firsts, rank + p.tensor - 1))
            pool = slowest({runs[run][2] for run in own})
            replicas[pool] = replicas.get(pool, 0) + 1
        parts = tuple(DeviceGroup(pool, p.tensor, count, p.micro_batch) for pool, count in replicas.items())
        stages.append(Stage(chunks, parts))
    settings = p.micro_batches, p.recompute, p.sequence_parallel, p.zero, p.schedule
    experts = p.experts if has_experts else 0
    return ParallelStrategy(tuple(stages), *settings, context=p.context, shard_ranks=p.shard, expert_ranks=experts)
