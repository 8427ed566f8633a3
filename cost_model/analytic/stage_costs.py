"""Computes the cost of one stage of a strategy: seconds of its passes and of the end of the step, memory of its ranks.

Stages may be unequal; the device groups of a stage (`Stage.parts`) may be of different devices with different numbers
of rows; the experts of a layer may be divided over replicas. A search computes many stages, so this code is written to
cost microseconds per stage.

Decisions: 0056, 0207.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cost_model.analytic.layer_costs import (
    MATRICES_OUTSIDE,
    MATRICES_PER_LAYER,
    TENSORS_OUTSIDE,
    TENSORS_PER_LAYER,
    LayerCosts,
    Model,
    costs_of,
)
from cost_model.analytic.memory import Footprint, count_offloaded_bytes, part_memory, states
from cost_model.analytic.stacks import Stack
from cost_model.cluster.pools import Machines, Pool
from cost_model.kernels.collectives import Group, all_gather_s, all_reduce_s, exchange_tokens_s, reduce_scatter_s
from cost_model.kernels.compute import CHANNELS, Rates, streaming_s
from cost_model.simulator import not_hidden_s
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Recompute, Stage

# Parameters that Adam updates on a host's processors in a second: Ren et al., "ZeRO-Offload", ATC 2021, table 5 (10
# billion in 2.57 s).
HOST_UPDATES_PER_S = 3.9e9
# On the host, for each piece of a tensor that is sent as a list of pieces: a view where the list is made and one where
# it is copied (ProcessGroupNCCL.cpp of PyTorch 1.8, allgather and reduce_scatter), about a microsecond each (estimate).
VIEWS_S = 2e-6

# What a channel of a ring carries: NCCL, src/graph/tuning.cc, perChMaxRingLL128Bws of Volta and Ampere.
CHANNEL_BYTES_PER_S = 20e9

COUNT_BYTES = 8  # of the number of tokens that one rank sends to an expert
PASSES = 2  # forward and backward, over which the counts of tokens are spread: only the forward pass exchanges them


class StageCost(msgspec.Struct, frozen=True):
    """Holds the cost of one stage: seconds of its passes and of the end of the step, and memory of its ranks.

    Attributes:
        forward_s, backward_s: seconds of one micro-batch for each chunk on the slowest device group, sends included.
        send_s: seconds of the sends to the next and the previous stage in both passes, all chunks.
        reduce_s: seconds of gradient reduction after the last micro-batch.
        update_s: seconds of the optimizer.
        limiting: index of the device group whose passes take longest.
        memory: memory of a rank of each device group.
        lacking_bytes: bytes by which the worst device group's memory is too small; negative: bytes left.
        held_bytes: activations of one micro-batch that the limiting group keeps for its backward pass, for each chunk.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: float
    reduce_s: float
    update_s: float
    limiting: int
    memory: tuple[Footprint, ...]
    lacking_bytes: float
    held_bytes: tuple[float, ...]


def fully_sharded(model: Model, strategy: ParallelStrategy) -> bool:
    """Returns True if the step is one of plain FSDP: ZeRO 2 or 3, one stage of one chunk, no offload, no experts.

    Such a step gathers and reduces layers beside kernels and is simulated layer by layer (`sharded`). In all other
    strategies, communication is added to, or overlapped with, the kernels of each pass by a formula.
    """
    one = len(strategy.stages) == 1 and strategy.chunks == 1
    return strategy.zero >= 2 and one and strategy.offload == "none" and not model.experts


def find_level(model: Model, strategy: ParallelStrategy) -> int:
    """Returns the ZeRO level that describes when a step gathers and reduces.

    It is 1 also for ZeRO 2 and 3 if pipeline stages do both only once per step (`Stack.shards_stages`).
    """
    once = model.stack.shards_stages != "pass" and len(strategy.stages) > 1
    return min(strategy.zero, 1) if once else strategy.zero


def experts_s(group: Group, one: LayerCosts) -> float:
    """Returns the seconds of the all-to-all of tokens with a group's experts, in one pass of one layer.

    Includes the all-gather in which each rank first announces how many tokens it sends to each expert.

    Args:
        one: costs of the layers, whose `routed` describes the tokens; 0 seconds if the model has no experts.
    """
    if one.routed is None:
        return 0.0
    counted_s = all_gather_s(group, float(COUNT_BYTES * one.routed.experts * group.size))
    return exchange_tokens_s(group, one.routed) + counted_s / PASSES


def _beside_s(kernels_s: float, exchange_s: float, part: float, lost: float) -> float:
    """Returns the seconds of kernels plus an all-to-all of which the fraction `part` overlaps kernels.

    Args:
        lost: fraction of the device's multiprocessors that the overlapped all-to-all takes from kernels.
    """
    hidden_s = min(part * exchange_s, kernels_s)
    return kernels_s + lost * hidden_s + exchange_s - hidden_s


def stage_cost(
    model: Model,
    machines: Machines,
    strategy: ParallelStrategy,
    index: int,
    live: int,
    ranks: int,
    passes: Passes | None = None,
    memory: tuple[tuple[Footprint, ...], float] | None = None,
    alike: Stage | None = None,
) -> StageCost:
    """Computes the cost of stage `index` of a strategy.

    Args:
        live: number of micro-batch chunks whose activations the stage holds at its peak (see `count_live_chunks`).
        ranks: number of ranks of the whole job, of which the slowest sets the pace.
        passes: what `passes_of` returns for the stage, if known.
        memory: what `stage_memory` and `lacking_bytes` return for the stage, if known.
        alike: the stage with its layers replaced by others that cost the same (see `StageCosts`); None: the stage
            itself.
    """
    stage, count = alike or strategy.stages[index], len(strategy.stages)
    hidden = model.stack.overlaps_sends and strategy.chunks > 1
    passes = passes or passes_of(model, machines, strategy, stage, ranks)
    ahead, back, limiting, costs = passes.forward_s, passes.backward_s, passes.limiting, passes.costs
    dense = [one.parameters_of(stage.layers) for one in costs]
    experts = [one.experts_of(stage.layers) for one in costs]
    to_next_s, to_previous_s = (0.0, 0.0) if count == 1 or hidden else _sends_s(model, machines, strategy, index, stage)
    # The model's last chunk sends no activations, the first one no gradients.
    last = count * strategy.chunks - 1
    at = range(index, last + 1, count)
    sent_ahead_s = [to_next_s if i < last else 0.0 for i in at]
    sent_back_s = [to_previous_s if i > 0 else 0.0 for i in at]
    if model.stack.receives_block:  # what a neighbour sends takes as long as what is sent there
        sent_ahead_s = [s + (to_previous_s if i > 0 else 0.0) for i, s in zip(at, sent_ahead_s)]
        sent_back_s = [s + (to_next_s if i < last else 0.0) for i, s in zip(at, sent_back_s)]
    # The gradients of experts are summed only where several replicas have these.
    summed = [own + e * (one.expert_copies > 1) for own, e, one in zip(dense, experts, costs)]
    level = find_level(model, strategy)
    reduce_s = reduction_s(model, machines, stage.parts, summed, level, strategy.count_sharding(stage))
    if model.stack.hides_data_parallel:
        counts = [high - low for low, high in stage.layers]
        lost = 0.0
        if reduce_s > 0:  # as many channels as carry the ring
            carried = machines.data_group(members(stage.parts)).ring_bytes_per_s / (CHANNELS * CHANNEL_BYTES_PER_S)
            lost = min(1.0, carried) * max(rates_of_part(model, machines, part).lost_units for part in stage.parts)
        reduce_s = not_hidden_s(reduce_s, counts, back, min(count, strategy.micro_batches), lost)
    if memory is None:
        footprints = stage_memory(strategy, stage, costs, live, count)
        memory = footprints, lacking_bytes(machines, strategy, stage, costs, footprints)
    slowest = costs[limiting].held_bytes
    return StageCost(
        forward_s=tuple([a + b for a, b in zip(ahead, sent_ahead_s)]),
        backward_s=tuple([a + b for a, b in zip(back, sent_back_s)]),
        send_s=sum(sent_ahead_s) + sum(sent_back_s),
        reduce_s=reduce_s,
        update_s=_update_s(model, machines, strategy, stage, costs, dense, experts),
        limiting=limiting,
        memory=memory[0],
        lacking_bytes=memory[1],
        held_bytes=tuple([slowest[high] - slowest[low] for low, high in stage.layers]),
    )


def _sends_s(
    model: Model, machines: Machines, strategy: ParallelStrategy, index: int, stage: Stage
) -> tuple[float, float]:
    """Returns the seconds to send one micro-batch to (the next stage, the previous stage), over the slowest link of
    each.
    """
    stages, sends, ranks = strategy.stages, [0.0, 0.0], stage.ranks
    for way, other in enumerate((index + 1, index - 1)):
        neighbour = stages[other % len(stages)].parts
        cut = min(model.count - 1, max(1, stage.layers[0][1 - way]))
        for part in stage.parts:
            path = min(machines.send_path(part.pool, peer.pool, ranks) for peer in neighbour)
            rows = part.rows / strategy.context
            sends[way] = max(sends[way], model.send_s(cut, part.tensor, rows, strategy.sequence_parallel, path))
    return sends[0], sends[1]


def passes_of(model: Model, machines: Machines, strategy: ParallelStrategy, stage: Stage, ranks: int) -> Passes:
    """Returns the seconds of a stage's forward and backward pass over one micro-batch, without sends between stages.

    If the stage has several device groups (``stage.parts``), the slowest counts. The seconds depend only on the stage
    and the strategy's settings, not on other stages, so a search can cache them.
    """
    replicas = stage.replicas
    costs = [costs_of(model, strategy, part, ranks, replicas, stage.recompute) for part in stage.parts]
    plain = find_level(model, strategy) < 2 and strategy.offload == "none" and not model.experts
    moves = None if plain else _Moves.price(model, machines, strategy, stage, costs)
    forwards, backwards, limiting, longest = [], [], 0, -1.0
    for low, high in stage.layers:
        if moves is None:
            ahead = [one.forward(low, high) for one in costs]
            back = [one.backward(low, high) for one in costs]
        else:
            passes = [moves.passes_s(part, one, low, high) for part, one in zip(stage.parts, costs)]
            ahead, back = [p[0] for p in passes], [p[1] for p in passes]
        forwards.append(max(ahead))
        backwards.append(max(back))
        both = [a + b for a, b in zip(ahead, back)]
        if (most := max(both)) > longest:
            longest, limiting = most, both.index(most)
    return Passes(forwards, backwards, limiting, costs, sum(forwards) + sum(backwards))


def members(parts: Sequence[DeviceGroup]) -> tuple[tuple[int, int, int], ...]:
    """Returns (pool, tensor-parallel degree, replicas) of each device group, the form that `Machines.data_group`
    takes.
    """
    return tuple((part.pool, part.tensor, part.replicas) for part in parts)


class Passes(msgspec.Struct, frozen=True):
    """Holds the seconds of a stage's passes over one micro-batch, without sends between stages.

    Attributes:
        forward_s, backward_s: seconds of each chunk on the slowest device group.
        limiting: index in ``Stage.parts`` of the slowest device group.
        costs: the costs of the model's layers on each device group.
        both_s: seconds of all these passes together.
    """

    forward_s: list[float]
    backward_s: list[float]
    limiting: int
    costs: list[LayerCosts]
    both_s: float


@dataclass(frozen=True, slots=True)
class _Moves:
    """Holds what a stage communicates during each pass: ZeRO's gathers and reductions, experts' all-to-all, offload
    copies.

    Attributes:
        data: the replicas over which ZeRO shards states; None if there is only one.
        experts: the replicas over which a layer's experts are divided (the slowest such group); None if each replica
            has all experts.
        copies: the ranks that hold the same shard of the states (hybrid sharding); None if no two do.
    """

    model: Model
    machines: Machines
    strategy: ParallelStrategy
    stage: Stage
    data: Group | None
    experts: Group | None
    copies: Group | None

    @staticmethod
    def price(
        model: Model, machines: Machines, strategy: ParallelStrategy, stage: Stage, costs: Sequence[LayerCosts]
    ) -> _Moves:
        data, copies = sharding_groups(machines, stage.parts, strategy.count_sharding(stage))
        ways = stage.replicas // costs[0].expert_copies if model.experts else 1
        experts = None
        if ways > 1:  # all layers' exchanges wait for the slowest of the groups that each have all experts
            groups = [machines.data_group(one) for one in _neighbours(stage.parts, ways)]
            experts = max(groups, key=lambda group: experts_s(group, costs[0]))
        return _Moves(model, machines, strategy, stage, data, experts, copies)

    def passes_s(self, part: DeviceGroup, one: LayerCosts, low: int, high: int) -> tuple[float, float]:
        """Returns the seconds of (forward, backward) pass of layers low..high-1, including communication.

        Experts' all-to-all runs between kernels. Gathers and offload copies overlap the kernels of the previous layer,
        gradient reductions those of the next one; so the longer of the two counts for every layer, and the other for
        one layer.
        """
        count, ranges, strategy = high - low, ((low, high),), self.strategy
        forward_s, backward_s = one.forward(low, high) / count, one.backward(low, high) / count
        if self.experts is not None:
            exchange_s, again = experts_s(self.experts, one), 2 if strategy.find_recompute(self.stage) == "full" else 1
            part_hidden = self.model.stack.hides_experts
            lost = rates_of_part(self.model, self.machines, part).lost_units
            forward_s = _beside_s(forward_s, exchange_s, part_hidden, lost)
            backward_s = _beside_s(backward_s, exchange_s * again, part_hidden, lost)
        ahead_s = back_s = 0.0
        if self.data is not None and find_level(self.model, strategy) >= 2:
            rates = rates_of_part(self.model, self.machines, part)
            how, own = strategy.find_recompute(self.stage), one.parameters_of(ranges) / count
            if one.expert_copies > 1:  # experts that several replicas have are divided like all else
                own += one.experts_of(ranges) / count
            each = ShardedLayer.price(self.model, self.data, rates, own, strategy.zero, how, copies=self.copies)
            forward_s, backward_s = each.forward_s(forward_s), each.backward_s(backward_s)
            if not each.hidden:
                forward_s, backward_s = forward_s + each.gather_s, backward_s + each.again_s + each.reduce_s
            else:
                ahead_s, back_s = each.gather_s, each.reduce_s
                if strategy.zero >= 3:  # the next layer is gathered once the gradients have gone: one stream does both
                    backward_s, back_s = backward_s + each.again_s + each.reduce_s, 0.0
        if strategy.offload == "parameters":
            held, gradients, _ = states(one, ranges, strategy.count_sharding(self.stage), strategy.zero)
            rate = self.machines.pools[part.pool].host_bytes_per_s * count
            ahead_s, back_s = max(ahead_s, held / rate), max(back_s, (held + gradients) / rate)
        return _overlap_layers_s(forward_s, ahead_s, count), _overlap_layers_s(backward_s, back_s, count)


@dataclass(frozen=True, slots=True)
class ShardedLayer:
    """Holds the communication of ZeRO 2 and 3 for one layer and one micro-batch.

    Attributes:
        gather_s: seconds to all-gather its parameters before the forward pass.
        again_s: seconds to all-gather them again for the backward pass; 0 unless ZeRO 3.
        reduce_s: seconds to reduce-scatter its gradients.
        copy_s: seconds to copy its gradients into and out of communication buffers.
        lost: fraction of the device's multiprocessors that collectives take from the kernels beside them.
        hidden: whether the collectives overlap kernels; if not, kernels wait for them.
    """

    gather_s: float
    again_s: float
    reduce_s: float
    copy_s: float
    lost: float
    hidden: bool

    @staticmethod
    def price(
        model: Model,
        group: Group,
        rates: Rates,
        parameters: float,
        zero: int,
        how: Recompute,
        outside: bool = False,
        copies: Group | None = None,
    ) -> ShardedLayer:
        """Computes the communication of ZeRO for some parameters of one rank over a group of replicas.

        Args:
            group: the replicas over which ZeRO shards the parameters.
            parameters: number of parameters.
            zero: ZeRO level, 2 or 3.
            how: kind of recompute.
            outside: whether these are the parameters outside the layers (embedding and head).
            copies: ranks that hold the same shard, which all-reduce its gradients after the reduce-scatter (hybrid
                sharding: Zhao et al., "PyTorch FSDP", 2023, section 3.2.2); None: no two do.
        """
        stack = model.stack
        tensors = (MATRICES_OUTSIDE, TENSORS_OUTSIDE) if outside else (MATRICES_PER_LAYER, TENSORS_PER_LAYER)
        matrices, all_tensors = tensors if stack.shards_tensors else (1, 1)
        gather_s = matrices * _predict_sharded_s(stack, rates, group, stack.element_bytes * parameters / matrices)
        reduce_s = matrices * _predict_sharded_s(stack, rates, group, stack.gradient_bytes * parameters / matrices)
        reduce_s += (all_tensors - matrices) * _predict_sharded_s(stack, rates, group, 0.0)  # vectors: next to no bytes
        if copies is not None:
            reduce_s += all_reduce_s(copies, stack.gradient_bytes * parameters / group.size)
        times = 2 if stack.shards_tensors and how == "full" and not outside else 1
        return ShardedLayer(
            gather_s=gather_s,
            again_s=times * gather_s if zero >= 3 else 0.0,
            reduce_s=reduce_s,
            copy_s=streaming_s(rates, stack.gradient_copy_bytes * parameters),
            lost=rates.lost_units if stack.hides_data_parallel else 0.0,
            hidden=stack.hides_data_parallel,
        )

    def forward_s(self, kernels_s: float) -> float:
        """Returns the seconds of the forward pass's kernels, slowed down by the collectives that overlap them."""
        return kernels_s + self.lost * min(self.gather_s, kernels_s)

    def backward_s(self, kernels_s: float) -> float:
        """Returns the seconds of the backward pass's kernels and gradient copies, slowed down by collectives that
        overlap them.
        """
        kernels_s += self.copy_s
        return kernels_s + self.lost * min(self.again_s + self.reduce_s, kernels_s)


def _predict_sharded_s(stack: Stack, rates: Rates, group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of one all-gather or reduce-scatter of a tensor that is sharded over a group's ranks.

    If the software copies a tensor shard by shard (`Stack.shards_tensors`), each shard costs one kernel launch; that
    time does not depend on the tensor's size and grows with the group.
    """
    moved_s = all_gather_s(group, tensor_bytes)
    if not stack.shards_tensors:
        return moved_s
    launches_s = group.size * (VIEWS_S + max(stack.backward_host_us * 1e-6, rates.kernel_s))
    return moved_s + max(streaming_s(rates, 2 * tensor_bytes), launches_s)


def rates_of_part(model: Model, machines: Machines, part: DeviceGroup) -> Rates:
    """Returns the rates (FLOP/s, bytes/s) of one device of a device group under the model's stack."""
    return machines.rates(part.pool, model.stack.dtype, model.stack.kernel_time)


def sharding_groups(machines: Machines, parts: Sequence[DeviceGroup], ways: int) -> tuple[Group | None, Group | None]:
    """Returns (group of `ways` replicas over which ZeRO shards states, group of ranks that hold the same shard).

    Either is None if it would have one rank only. The second is for hybrid sharding, where `ways` is less than all
    replicas.
    """
    data = machines.data_group(_first(parts, ways)) if ways > 1 else None
    if ways == sum(part.replicas for part in parts):
        return data, None
    return data, machines.data_group(_apart(parts, ways))


def _apart(parts: Sequence[DeviceGroup], ways: int) -> tuple[tuple[int, int, int], ...]:
    """Returns every `ways`-th replica of some device groups, in the form of `members`.

    With hybrid sharding over `ways` neighbouring replicas, these replicas hold the same shard and all-reduce its
    gradients.
    """
    found, passed = [], 0
    for pool, tensor, count in members(parts):
        taken = -(-(passed + count) // ways) - -(-passed // ways)
        passed += count
        if taken:
            found.append((pool, tensor * ways, taken))
    return tuple(found)


def _first(parts: Sequence[DeviceGroup], replicas: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the first ``replicas`` replicas of some device groups, which are neighbours, in the form of `members`."""
    if replicas == sum(part.replicas for part in parts):
        return members(parts)
    found, left = [], replicas
    for pool, tensor, count in members(parts):
        if taken := min(left, count):
            found.append((pool, tensor, taken))
            left -= taken
    return tuple(found)


def _neighbours(parts: Sequence[DeviceGroup], ways: int) -> list[tuple[tuple[int, int, int], ...]]:
    """Cuts the replicas of some device groups into groups of `ways` neighbours; returns each different kind of group
    once.
    """
    found: dict[tuple[tuple[int, int, int], ...], None] = {}
    group: list[tuple[int, int, int]] = []
    room = ways
    for pool, tensor, count in members(parts):
        while count:
            if room == ways and count >= ways:  # whole groups, all alike
                found[((pool, tensor, ways),)] = None
                count %= ways
                continue
            taken = min(room, count)
            group.append((pool, tensor, taken))
            room, count = room - taken, count - taken
            if not room:
                found[tuple(group)] = None
                group, room = [], ways
    return list(found)


def _overlap_layers_s(compute_s: float, moved_s: float, count: int) -> float:
    """Returns the seconds of `count` layers whose communication overlaps the kernels of the layer before or after.

    Args:
        compute_s, moved_s: seconds of one layer's kernels, and of its communication.
    """
    return count * max(compute_s, moved_s) + (min(compute_s, moved_s) if moved_s else 0.0)


def reduction_s(
    model: Model,
    machines: Machines,
    parts: tuple[DeviceGroup, ...],
    parameters: list[float],
    zero: int,
    shard_ranks: int = 0,
) -> float:
    """Returns the seconds to reduce a stage's gradients over its replicas after the last pass, on the slowest device
    group.

    0 for ZeRO 2 and 3, which reduce during the passes. ZeRO 1 includes the all-gather of updated parameters.

    Args:
        parts: the stage's device groups.
        parameters: number of parameters on a rank of each group.
        zero: ZeRO level 0 to 3.
        shard_ranks: number of replicas over which ZeRO shards states; 0: all.
    """
    replicas = sum(part.replicas for part in parts)
    if zero >= 2 or replicas == 1:
        return 0.0  # ZeRO 2 and 3 gather and reduce in every pass
    stack = model.stack
    group = machines.data_group(members(parts))
    data, copies = sharding_groups(machines, parts, shard_ranks or replicas) if zero else (group, None)
    found = 0.0
    for part, own in zip(parts, parameters):
        gradient_bytes = stack.gradient_bytes * own
        if zero == 1 and data is not None:
            seconds = reduce_scatter_s(data, gradient_bytes) + all_gather_s(data, stack.element_bytes * own)
            seconds += 0.0 if copies is None else all_reduce_s(copies, gradient_bytes / data.size)
        else:
            seconds = all_reduce_s(group, gradient_bytes)
        per_byte_s = 1.0 / rates_of_part(model, machines, part).memory_bytes_per_s
        found = max(found, seconds + stack.gradient_copy_bytes * own * per_byte_s)
    return found


def _update_s(
    model: Model,
    machines: Machines,
    strategy: ParallelStrategy,
    stage: Stage,
    costs: Sequence[LayerCosts],
    dense: Sequence[float],
    experts: Sequence[float],
) -> float:
    """Returns the seconds of the optimizer on the slowest device group.

    Measured seconds are used if there are any; else the longer of memory traffic and kernel launches.

    Args:
        dense, experts: number of parameters outside experts, and in experts, on a rank of each device group.
    """
    stack, found = model.stack, 0.0
    replicas = strategy.count_sharding(stage) if strategy.zero >= 1 else 1
    for part, one, own, of_experts in zip(stage.parts, costs, dense, experts):
        if one.update_s is not None:
            found = max(found, sum(one.update_s[high] - one.update_s[low] for low, high in stage.layers))
            continue
        own = own / replicas + of_experts / (one.expert_copies if strategy.zero >= 1 else 1)
        if strategy.offload != "none":
            found = max(found, _on_host_s(machines.pools[part.pool], own, strategy.offload, stack.element_bytes))
            continue
        rates = rates_of_part(model, machines, part)
        if strategy.zero >= 2 and fully_sharded(
            model, strategy
        ):  # each layer's parameters are one tensor, others as well
            device_s, tensors = streaming_s(rates, stack.optimizer_bytes * own), stage.count + 1
        else:
            device_s = stack.optimizer_bytes * own / rates.memory_bytes_per_s
            tensors = one.tensors * stage.count + TENSORS_OUTSIDE
        found = max(found, device_s, tensors * stack.update_kernels * stack.host_us * 1e-6)
    return found


def _on_host_s(pool: Pool, parameters: float, offload: Offload, element_bytes: int) -> float:
    """Returns the seconds of an optimizer update on the host's processors, for `parameters` of one rank.

    With `offload="optimizer"`, includes copying gradients to the host and weights back.
    """
    moved_s = 2 * element_bytes * parameters / pool.host_bytes_per_s if offload == "optimizer" else 0.0
    return moved_s + parameters * pool.host_devices / HOST_UPDATES_PER_S


def stage_memory(
    settings: ParallelStrategy, stage: Stage, costs: Sequence[LayerCosts], live: int, stages: int
) -> tuple[Footprint, ...]:
    """Returns the memory footprint of a rank of each device group of a stage.

    Args:
        settings: the strategy, for ZeRO, offload and micro-batches.
        costs: costs of the layers on each group's ranks.
        live: number of micro-batch chunks whose activations are held at the peak.
        stages: number of stages of the strategy.
    """
    zero, offload, replicas = settings.zero, settings.offload, settings.count_sharding(stage)
    forward_first = len(stage.layers) > 1 and settings.micro_batches < 2 * stages  # see `schedule_interleaved`
    return tuple([
        part_memory(one, stage.layers, part, replicas, live, zero, stages, offload, forward_first)
        for part, one in zip(stage.parts, costs)
    ])  # fmt: skip


def lacking_bytes(
    machines: Machines,
    settings: ParallelStrategy,
    stage: Stage,
    costs: Sequence[LayerCosts],
    memory: Sequence[Footprint],
) -> float:
    """Returns the bytes by which the worst device group's ranks exceed their device's memory, or their host's with
    offload.

    Negative: bytes that are left.
    """
    lacking = max([f.total_bytes - machines.pools[p.pool].memory_bytes for f, p in zip(memory, stage.parts)])
    if settings.offload != "none":
        for part, one in zip(stage.parts, costs):
            ways = settings.count_sharding(stage)
            used = count_offloaded_bytes(one, stage.layers, ways, settings.zero, settings.offload)
            lacking = max(lacking, used - machines.pools[part.pool].host_bytes)
    return lacking
