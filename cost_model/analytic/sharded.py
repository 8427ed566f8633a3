"""Simulates one step of fully sharded data parallelism (ZeRO 2 and 3, as in PyTorch FSDP) on two streams.

Layers are gathered and reduced on a network stream, beside the kernels on the compute stream.

Every micro-batch all-gathers each layer's parameters before its forward pass and, with ZeRO 3, again before its
backward pass, and reduce-scatters its gradients (Zhao et al., "PyTorch FSDP", 2023, sections 3.2 and 3.3). At most
`LAYERS_AHEAD` gathered layers wait for the kernels (the same, section 3.4, rate limiter). Parameters outside the layers
(embedding and head) are gathered first and reduced last. In stacks that do not overlap communication, it is counted as
part of the passes, and the network stream is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.analytic.kernel_costs import Cost
from cost_model.analytic.layer_costs import LayerCosts, Model, costs_of
from cost_model.analytic.memory import LAYERS_AHEAD
from cost_model.analytic.stage_costs import ShardedLayer, members, rates_of_part, sharding_groups
from cost_model.cluster.pools import Machines
from cost_model.kernels.collectives import Group
from cost_model.kernels.compute import Rates
from cost_model.simulator import Tasks
from whale.ir.strategy import ParallelStrategy, Recompute

COMPUTE, NETWORK = 0, 1
# Micro-batches that are played; each further one takes as long as the last of these.
PLAYED = 3


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """Holds the seconds of what FSDP wraps as one unit: a layer, or everything outside the layers.

    Attributes:
        forward_s, backward_s: the passes, with communication that kernels wait for.
        kernels_s: kernels of both passes.
        gather_s: one all-gather of the parameters, beside kernels; 0 if kernels wait for it.
        reduce_s: the reduce-scatter of the gradients, beside kernels; 0 if kernels wait for it.
    """

    forward_s: float
    backward_s: float
    kernels_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True, slots=True)
class ShardedPasses:
    """Holds the simulated passes of a fully sharded step.

    Attributes:
        passes_s: seconds until the last gradient is reduced.
        forward_s, backward_s: seconds of one micro-batch, waits included; times the number of micro-batches they add up
            to `passes_s`.
        compute_s: seconds of the kernels of all micro-batches.
        root: the unit of everything outside the layers.
        layers: the unit of each layer.
    """

    passes_s: float
    forward_s: float
    backward_s: float
    compute_s: float
    root: ShardedUnit
    layers: tuple[ShardedUnit, ...]


def passes(model: Model, machines: Machines, strategy: ParallelStrategy) -> ShardedPasses:
    """Simulates the passes of a fully sharded strategy with one stage.

    Only the first `PLAYED` micro-batches are simulated; each further one adds the time of the last of these.
    """
    stage, count = strategy.stages[0], strategy.micro_batches
    group, copies = sharding_groups(machines, stage.parts, strategy.count_sharding(stage))
    group = group or machines.data_group(members(stage.parts))
    each: list[list[ShardedUnit]] = []
    for part in stage.parts:
        one = costs_of(model, strategy, part, strategy.ranks, stage.replicas, stage.recompute)
        rates = rates_of_part(model, machines, part)
        each.append(_units(model, one, group, copies, rates, strategy.zero, strategy.find_recompute(stage)))
    root, *layers = (_slowest(units) for units in zip(*each))
    ends_s = simulate_ends_s(root, layers, min(PLAYED, count), strategy.zero >= 3)
    more_s = ends_s[-1] - ends_s[-2] if len(ends_s) > 1 else 0.0
    passes_s = ends_s[-1] + (count - len(ends_s)) * more_s
    forward_s = root.forward_s + sum(unit.forward_s for unit in layers)
    backward_s = root.backward_s + sum(unit.backward_s for unit in layers)
    forward_s *= passes_s / count / ((forward_s + backward_s) or 1.0)
    compute_s = count * (root.kernels_s + sum(unit.kernels_s for unit in layers))
    return ShardedPasses(passes_s, forward_s, passes_s / count - forward_s, compute_s, root, tuple(layers))


def _units(
    model: Model, one: LayerCosts, group: Group, copies: Group | None, rates: Rates, zero: int, how: Recompute
) -> list[ShardedUnit]:
    """Returns the unit outside the layers, then one unit per layer, for one kind of rank.

    Args:
        one: costs of the layers on that kind of rank.
        group: the ranks over which ZeRO shards.
        copies: the ranks with the same shards (hybrid sharding), or None.
        zero: ZeRO level, 2 or 3.
        how: kind of recompute.
    """
    first, last = one.edges
    outside = first.parameters + last.parameters - one.twice
    found = [_unit(ShardedLayer.price(model, group, rates, outside, zero, how, True, copies), first.plus(last))]
    moves: dict[float, ShardedLayer] = {}  # by parameters, which many layers have equally many of
    for index in range(one.count):
        own = one.layer_parameters_of(((index, index + 1),))
        if own not in moves:
            moves[own] = ShardedLayer.price(model, group, rates, own, zero, how, copies=copies)
        found.append(_unit(moves[own], one.layer(index)))
    return found


def _unit(moves: ShardedLayer, passes: tuple[Cost, Cost]) -> ShardedUnit:
    forward, backward = passes
    ahead_s, back_s = moves.forward_s(forward.device_s), moves.backward_s(backward.device_s)
    forward_s = Cost(ahead_s, forward.exposed_s, forward.host_s).seconds
    backward_s = Cost(back_s, backward.exposed_s, backward.host_s).seconds
    kernels_s = ahead_s + back_s
    if moves.hidden:
        return ShardedUnit(forward_s, backward_s, kernels_s, moves.gather_s, moves.reduce_s)
    return ShardedUnit(
        forward_s + moves.gather_s, backward_s + moves.again_s + moves.reduce_s, kernels_s, gather_s=0.0, reduce_s=0.0
    )


def _slowest(units: Sequence[ShardedUnit]) -> ShardedUnit:
    """Returns one layer's unit with the slowest time of each part over unequal ranks, as these wait in every
    collective.
    """
    if len(units) == 1:
        return units[0]
    return ShardedUnit(
        max(unit.forward_s for unit in units),
        max(unit.backward_s for unit in units),
        max(unit.kernels_s for unit in units),
        max(unit.gather_s for unit in units),
        max(unit.reduce_s for unit in units),
    )


def simulate_ends_s(root: ShardedUnit, layers: Sequence[ShardedUnit], micro_batches: int, again: bool) -> list[float]:
    """Returns the seconds at which each micro-batch's last pass and reduction end.

    Gives the same times as `simulate(tasks(...))`, but many times faster.

    Args:
        again: whether parameters are gathered again for the backward pass (ZeRO 3).
    """
    compute_s = network_s = 0.0  # when each stream is free
    ends: list[float] = []
    used_s = [0.0] * LAYERS_AHEAD  # ends of the latest passes of layers, each of which frees a gathered layer
    oldest = 0
    for _ in range(micro_batches):
        network_s += root.gather_s
        compute_s = max(compute_s, network_s) + root.forward_s
        for unit in layers:
            network_s = max(network_s, used_s[oldest]) + unit.gather_s
            compute_s = max(compute_s, network_s) + unit.forward_s
            used_s[oldest] = compute_s
            oldest = (oldest + 1) % LAYERS_AHEAD
        compute_s += root.backward_s
        for unit in reversed(layers):
            if again:
                network_s = max(network_s, used_s[oldest]) + unit.gather_s
                compute_s = max(compute_s, network_s)
            compute_s += unit.backward_s
            used_s[oldest] = compute_s
            oldest = (oldest + 1) % LAYERS_AHEAD
            network_s = max(network_s, compute_s) + unit.reduce_s
        network_s += root.reduce_s
        ends.append(max(compute_s, network_s))
    return ends


def tasks(root: ShardedUnit, layers: Sequence[ShardedUnit], micro_batches: int, again: bool) -> Tasks:
    """Creates simulator tasks in order of issue: passes on stream `COMPUTE`, gathers and reductions on `NETWORK`.

    Args:
        again: whether parameters are gathered again for the backward pass (ZeRO 3).
    """
    found = Tasks()
    used: list[int] = []  # passes of layers, in order, which free a gathered layer

    def gather(unit: ShardedUnit) -> tuple[int, ...]:
        freed = (used[-LAYERS_AHEAD],) if len(used) >= LAYERS_AHEAD else ()
        return (found.add(NETWORK, unit.gather_s, freed),)

    for _ in range(micro_batches):
        found.add(COMPUTE, root.forward_s, (found.add(NETWORK, root.gather_s),))
        for unit in layers:
            used.append(found.add(COMPUTE, unit.forward_s, gather(unit)))
        last = found.add(COMPUTE, root.backward_s)
        for unit in reversed(layers):
            last = found.add(COMPUTE, unit.backward_s, gather(unit) if again else ())
            used.append(last)
            found.add(NETWORK, unit.reduce_s, (last,))
        found.add(NETWORK, root.reduce_s, (last,))
    return found
