"""Compares a plan with the best plan on a changed cluster: what moves between devices, how long, and when that pays
off.

A host counts as the same if the cluster file names it the same and it has the same number; if an entry now has fewer
hosts, the last ones are gone. A device keeps what it already holds. The rest comes from other devices through the
hosts' network adapters, or from a checkpoint where no remaining device holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from cost_model.analytic.layer_costs import Model, costs_of
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.plan_text import format_bytes, format_change, format_seconds
from whale.ir.strategy import ParallelStrategy, count_expert_ranks
from whale.planner import ask
from whale.planner.report.planfile import PlanFile
from whale.planner.run_described import devices_of

Place = tuple[str, int, int, int]  # name of the host entry, number of the host, of the device entry, of the device
Span = tuple[float, float]  # a part of a tensor: begin and end as fractions from 0 to 1
ROUNDING = 1e-9  # fractions of a tensor below this are rounding errors


@dataclass(frozen=True)
class Held:
    """Represents a part of a layer's data that a device holds.

    Attributes:
        layer: number of the layer.
        kind: "weights", "experts" (their weights), "state" or "experts' state" (of the optimizer).
        span: the part, as fractions of the whole data from 0 to 1.
    """

    layer: int
    kind: str
    span: Span


@dataclass(frozen=True)
class Moves:
    """Holds what a change of plans moves.

    Attributes:
        moved_bytes: bytes that devices get from other devices.
        lost_bytes: bytes that no remaining device holds, which have to come from a checkpoint.
        seconds: time until the slowest host has received all that its devices lack.
    """

    moved_bytes: float
    lost_bytes: float
    seconds: float


def compare(plan: PlanFile, cluster: Cluster, budget_s: float) -> list[str]:
    """Describes, in lines of text, how a described model's plan would run on another cluster and what the best plan
    there is.

    Args:
        budget_s: seconds of work for the search on the other cluster.

    Raises:
        PlanError: the plan is one of a script's program, or nothing fits on the other cluster.
    """
    if plan.program is not None:
        raise PlanError(
            "a script's plan cannot be moved to another cluster",
            expected="a plan of a described model or of a profile",
            action="plan the script for that cluster: `whale plan --cluster FILE script.py`",
        )
    own = msgspec.structs.replace(plan, cluster=cluster)
    kept = carried(plan, Machines(cluster))
    stays = "does not fit there"
    kept_s = math.inf
    if kept is not None:
        found = msgspec.structs.replace(own, strategy=kept)
        evaluation = found.evaluate()[2]
        if evaluation.fits:
            kept_s = evaluation.step_s
            stays = f"{format_seconds(kept_s)} there ({format_change(kept_s - plan.step_s)})"
    new = ask.plan(cluster, plan.batch, plan.transformer, plan.table, plan.software, ask.limits([], budget_s))
    lines = [f"plan       {plan.strategy.format_summary()}: {format_seconds(plan.step_s)} a step, {stays}"]
    if new.step_s >= kept_s:
        return [*lines, "best       no faster plan was found: keep this one"]
    move = moves(plan, new)
    lines.append(f"best       {new.strategy.format_summary()}: {format_seconds(new.step_s)} a step")
    lost = (
        f"; {format_bytes(move.lost_bytes)} have to come from a checkpoint, as no remaining device holds them"
        if move.lost_bytes
        else ""
    )
    lines.append(
        f"move       {format_bytes(move.moved_bytes)} between hosts and devices, {format_seconds(move.seconds)} for "
        f"the slowest host, in addition to the restart{lost}"
    )
    if math.isinf(kept_s):
        return [*lines, "pays       at once: the plan cannot go on as it is"]
    gain_s = kept_s - new.step_s
    steps = math.ceil(move.seconds / gain_s)
    return [
        *lines,
        f"pays       after {steps:,} steps, as each is {format_seconds(gain_s)} shorter ({gain_s / kept_s:.1%}); "
        f"a restart of a minute takes {math.ceil(60 / gain_s):,} more",
    ]


def carried(plan: PlanFile, machines: Machines) -> ParallelStrategy | None:
    """Returns the plan's strategy with the pool numbers of other machines; None: it cannot run there."""
    of = {(pool.host.name, pool.entry.type): pool.number for pool in machines.pools}
    number = {pool.number: of.get((pool.host.name, pool.entry.type)) for pool in plan.machines.pools}
    stages = []
    for stage in plan.strategy.stages:
        parts = []
        for part in stage.parts:
            pool = number[part.pool]
            if pool is None:
                return None
            parts.append(msgspec.structs.replace(part, pool=pool))
        stages.append(msgspec.structs.replace(stage, parts=tuple(parts)))
    found = msgspec.structs.replace(plan.strategy, stages=tuple(stages))
    other = msgspec.structs.replace(plan, strategy=found, cluster=machines.cluster)
    return None if other.problems() else found


def moves(old: PlanFile, new: PlanFile) -> Moves:
    """Returns what has to move when training goes on under `new` after `old`."""
    machines = new.machines
    there = {
        (host.name, number, place, device)
        for host in machines.cluster.hosts
        for number in range(host.count)
        for place, entry in enumerate(host.devices)
        for device in range(entry.count)
    }
    before = {place: held for place, held in held_of(old).items() if place in there}
    left: dict[tuple[int, str], list[Span]] = {}
    for held in before.values():
        for one in held:
            left.setdefault((one.layer, one.kind), []).append(one.span)
    sizes = _sizes(new)
    moved = lost = 0.0
    by_host: dict[tuple[str, int], float] = {}
    anywhere: dict[tuple[int, str, Span], float] = {}
    for place, held in held_of(new).items():
        own: dict[tuple[int, str], list[Span]] = {}
        for one in before.get(place, ()):
            own.setdefault((one.layer, one.kind), []).append(one.span)
        for one in held:
            key, size = (one.layer, one.kind), sizes[one.layer, one.kind]
            lacking = _uncovered(one.span, own.get(key, []))
            if not lacking:
                continue
            at = (*key, one.span)
            if at not in anywhere:
                anywhere[at] = _uncovered(one.span, left.get(key, []))
            nowhere = min(lacking, anywhere[at])
            lost += nowhere * size
            moved += (lacking - nowhere) * size
            by_host[place[:2]] = by_host.get(place[:2], 0.0) + lacking * size
    seconds = max((size / _bytes_per_s(machines, name) for (name, _), size in by_host.items()), default=0.0)
    return Moves(moved, lost, seconds)


def held_of(plan: PlanFile) -> dict[Place, list[Held]]:
    """Returns what each device holds between two steps under a described model's plan, by the device's place."""
    machines, strategy = plan.machines, plan.strategy
    model = plan.model(machines)
    found: dict[Place, list[Held]] = {}
    for stage, devices in zip(strategy.stages, devices_of(strategy, machines)):
        ways = strategy.expert_ranks or count_expert_ranks(model.experts, stage.replicas)
        sharded = strategy.count_sharding(stage)
        number = first = 0  # of the replica, and of the device
        for part in stage.parts:
            for _ in range(part.replicas):
                for rank in range(part.tensor):
                    pool, host, device = devices[first]
                    first += 1
                    entry = machines.pools[pool]
                    place = (entry.host.name, host, entry.host.devices.index(entry.entry), device)
                    whole = (rank / part.tensor, (rank + 1) / part.tensor)
                    shard = _part_of(whole, number % sharded, sharded)
                    experts = _part_of(whole, number % ways, ways)
                    found[place] = [
                        Held(layer, kind, span)
                        for low, high in stage.layers
                        for layer in range(low, high)
                        for kind, span in (
                            ("weights", shard if strategy.zero >= 3 else whole),
                            ("state", shard if strategy.zero >= 1 else whole),
                            *((("experts", experts), ("experts' state", experts)) if model.experts else ()),
                        )
                    ]
                number += 1
    return found


def _part_of(span: Span, number: int, count: int) -> Span:
    each = (span[1] - span[0]) / count
    return span[0] + number * each, span[0] + (number + 1) * each


def _uncovered(span: Span, others: list[Span]) -> float:
    """Returns the length of the part of `span` that no other span covers."""
    at, lacking = span[0], 0.0
    for low, high in sorted(others):
        if low >= span[1]:
            break
        lacking += max(0.0, low - at)
        at = max(at, min(high, span[1]))
    lacking += max(0.0, span[1] - at)
    return lacking if lacking > ROUNDING else 0.0


def _sizes(plan: PlanFile) -> dict[tuple[int, str], float]:
    """Returns the bytes of each layer's data, not divided over ranks: {(layer, kind of `Held`): bytes}."""
    model: Model = plan.model(plan.machines)
    stage = plan.strategy.stages[0]
    part = stage.parts[0]
    costs = costs_of(model, plan.strategy, part, plan.strategy.ranks, stage.replicas)
    ways = plan.strategy.expert_ranks or count_expert_ranks(model.experts, stage.replicas)
    found: dict[tuple[int, str], float] = {}
    for layer in range(model.count):
        dense = part.tensor * (costs.parameters[layer + 1] - costs.parameters[layer])
        if layer == model.count - 1 and len(plan.strategy.stages) == 1:
            dense -= part.tensor * costs.twice  # tied weights, which lie there with the first layer
        experts = part.tensor * ways * costs.experts_of(((layer, layer + 1),))
        for kind, size in (("weights", costs.element_bytes), ("state", costs.state_bytes)):
            found[layer, kind] = size * dense
        for kind, size in (("experts", costs.element_bytes), ("experts' state", costs.state_bytes)):
            found[layer, kind] = size * experts
    return found


def _bytes_per_s(machines: Machines, name: str) -> float:
    """Returns how many bytes per second a host receives: through its fastest network; without one, over its devices'
    links.
    """
    host = next(one for one in machines.cluster.hosts if one.name == name)
    if not host.networks:
        return min(entry.intra_link().bytes_per_s * entry.count for entry in host.devices)
    _, entry, nics = machines.cluster.find_path(host, host)
    return entry.network.bytes_per_s * nics / entry.oversubscription
