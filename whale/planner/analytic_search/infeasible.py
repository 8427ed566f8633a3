"""Explains why no strategy fits into memory: which memory is too small, by how much, and what would help.

Each change that the error proposes was tried: the search finds a plan with that change alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stage_cache import count_lives
from cost_model.analytic.stage_costs import stage_cost
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines, Pool
from whale.errors import PlanError
from whale.ir.plan_text import format_bytes
from whale.ir.strategy import ParallelStrategy
from whale.planner.analytic_search.candidates import FIXED, Candidate, Constraints
from whale.planner.analytic_search.search import Search

MOST_PASSES = 20_000  # most passes of a step that is simulated for the message
TIMES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # factors of a device's memory that are tried
MOST_TIMES = 64  # largest factor of the number of hosts that is tried
HOST_GB = (256, 512, 1024, 2048)  # sizes of a host's memory that are tried if the cluster file gives none
LEAST_SEQUENCE = 128  # shortest sequence that is tried

Fits = Callable[[Model, Machines, Constraints], bool]


@dataclass(frozen=True, slots=True)
class Change:
    """Holds one change after which a strategy fits: its description, and the changed model, machines and
    constraints.
    """

    text: str
    model: Model
    machines: Machines
    limits: Constraints


def nothing_fits(searches: Sequence[Search], limits: Constraints, fits: Fits) -> PlanError:
    """Creates the error that reports that no strategy fits; it describes the strategy that lacks the least memory.

    Args:
        searches: the finished searches, one for each ZeRO level and offload.
        fits: returns True if the search finds a strategy for a model, machines and constraints.
    """
    first = searches[0]
    model, machines = first.model, first.machines
    nearest = _nearest(searches)
    if nearest is None:
        return PlanError(
            "no parallel strategy satisfies the constraints",
            given=f"{model.name}, a global batch of {first.batch // first.context} rows, {machines.devices} devices",
            reason="the batch is not replicas x micro-batches x rows for any values that the fixed choices and the "
            "measured sizes allow",
            action=_find_freed(model, machines, limits, fits)
            or "change the global batch, or with --profile measure more micro-batch sizes",
        )
    strategy, found = nearest
    stage = max(range(len(found.stages)), key=lambda s: found.stages[s].lacking_bytes)
    parts, memory = strategy.stages[stage].parts, found.stages[stage].memory
    pools = [machines.pools[part.pool] for part in parts]
    worst = max(range(len(parts)), key=lambda i: memory[i].total_bytes - pools[i].memory_bytes)
    pool, used = pools[worst], memory[worst]
    held = {
        "parameters": used.parameters_bytes,
        "gradients": used.gradients_bytes,
        "optimizer state": used.optimizer_bytes,
        "activations": used.activations_bytes,
        "communication buffers, with gathered parameters": used.communication_bytes,
    }
    most = max(held, key=lambda name: held[name])
    on_device = used.total_bytes > pool.memory_bytes
    needs = (
        f"needs {format_bytes(used.total_bytes)} per {pool.device.name}, which has {format_bytes(pool.memory_bytes)}"
    )
    lacking = used.total_bytes - pool.memory_bytes
    if not on_device:
        needs, lacking = f"offloads more than the memory of host {pool.host.name} holds", found.lacking_bytes
    states = {} if any(one.has_room_for_states() for one in searches) else {"states": _say_states(first)}
    proposed = [change.text for change in changes(model, machines, limits, pool, fits)]
    return PlanError(
        "no parallel strategy of the model fits into the devices' memory",
        given=f"{model.name} on {machines.devices} devices of {machines.cluster.name}",
        **states,
        nearest=f"{strategy.format_summary()}: stage {stage} {needs}; it lacks {format_bytes(lacking)}",
        largest_part=f"{most}, {format_bytes(held[most])}" if on_device else "the hosts' memory",
        action=", or ".join(proposed) or "change the model: neither more devices nor more memory is enough",
    )


def _say_states(search: Search) -> str:
    """Says what weights, gradients and optimizer state take, and what all devices and hosts together have for them."""
    pools = search.machines.pools
    hosts = sum(pool.devices * pool.host_bytes for pool in pools)
    devices = sum(pool.devices * pool.memory_bytes for pool in pools)
    return (
        f"weights, gradients and optimizer state take {format_bytes(sum(search.whole_states()))}; all devices together "
        f"have {format_bytes(devices)}, and their hosts "
        + (
            f"{format_bytes(hosts)} for what is offloaded"
            if hosts
            else "an unknown amount (the file gives no memory_gb)"
        )
    )


def _nearest(searches: Sequence[Search]) -> tuple[ParallelStrategy, Evaluation] | None:
    """Returns (strategy, evaluation) of the candidate that lacks the least memory; None: there is no candidate at
    all.
    """
    best: tuple[float, Search, Candidate] | None = None
    for search in searches:
        for one in search.least_memory():
            lacking = _lacking_bytes(search, one)
            if best is None or lacking < best[0]:
                best = lacking, search, one
    if best is None:
        return None
    _, search, one = best
    strategy = search.fit(one.even(search.model.count))
    # A schedule of many passes takes long to simulate, and needs as much memory as the same one with fewer passes.
    fewer = min(strategy.micro_batches, max(len(strategy.stages), MOST_PASSES // len(strategy.stages)))
    found = evaluate(search.model, search.machines, msgspec.structs.replace(strategy, micro_batches=fewer))
    return strategy, found


def _lacking_bytes(search: Search, one: Candidate) -> float:
    """Returns by how many bytes the worst stage of a candidate does not fit, with layers divided evenly; negative: room
    left.
    """
    strategy, at, lacking = one.even(search.model.count), 0, float("-inf")
    firsts = []
    for _, count in one.kinds:  # the first of equal stages holds most micro-batches
        firsts.append(at)
        at += count
    for index in {*firsts, at - 1}:
        cost = stage_cost(search.model, search.machines, strategy, index, count_lives(strategy)[index], search.ranks)
        lacking = max(lacking, cost.lacking_bytes)
    return lacking


def changes(model: Model, machines: Machines, limits: Constraints, pool: Pool, fits: Fits) -> Iterator[Change]:
    """Yields changes each of which alone makes a strategy fit: of the user's constraints, the devices, the hosts, the
    model.
    """
    yield from _release_constraints(model, machines, limits, fits)
    host = pool.host

    def with_hosts(count: int) -> tuple[Model, Machines, Constraints]:
        changed = _with_host(machines.cluster, pool, count=count)
        return model.on(changed), changed, limits

    times = _least(lambda n: fits(*with_hosts(n * host.count)), MOST_TIMES) if host.networks else None
    if times is not None:
        more = times * host.count - _bisect(
            lambda n: fits(*with_hosts(times * host.count - n)), times * host.count // 2
        )
        yield Change(f"take {more} hosts {host.name} instead of {host.count}", *with_hosts(more))
    for factor in TIMES:
        gb = factor * pool.memory_bytes / 1e9 / pool.entry.share
        changed = _with_device(machines.cluster, pool, gb)
        if fits(model.on(changed), changed, limits):
            yield Change(
                f"devices with {gb:.0f} GB on {host.name} ({factor:g} times as much)",
                model.on(changed),
                changed,
                limits,
            )
            break
    if not all(one.host.memory_gb for one in machines.pools):
        for each in HOST_GB:
            hosts = [msgspec.structs.replace(h, memory_gb=h.memory_gb or each) for h in machines.cluster.hosts]
            changed = Machines(msgspec.structs.replace(machines.cluster, hosts=hosts))
            if fits(model.on(changed), changed, limits):
                text = f"memory_gb: {each} of the hosts in the cluster file, if they have it"
                yield Change(f"{text}: state and weights can be offloaded", model.on(changed), changed, limits)
                break
    if isinstance(model, TransformerModel):
        yield from _smaller(model, machines, limits, fits)


def _smaller(model: TransformerModel, machines: Machines, limits: Constraints, fits: Fits) -> Iterator[Change]:
    """Yields changes of a transformer that make it fit: fewer layers, or a shorter sequence."""
    t = model.transformer

    def make_smaller(**other: int) -> TransformerModel:
        return model.of(msgspec.structs.replace(t, **other))

    fewer = t.layers - 1
    if fewer and fits(make_smaller(layers=1), machines, limits):
        low, high = 1, t.layers  # fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(make_smaller(layers=middle), machines, limits) else (low, middle)
        yield Change(f"{low} layers instead of {t.layers}", make_smaller(layers=low), machines, limits)
    sequence = t.sequence // 2
    while sequence >= LEAST_SEQUENCE:
        if fits(make_smaller(sequence=sequence), machines, limits):
            yield Change(
                f"a sequence of {sequence} instead of {t.sequence}", make_smaller(sequence=sequence), machines, limits
            )
            return
        sequence //= 2


def _release_constraints(model: Model, machines: Machines, limits: Constraints, fits: Fits) -> Iterator[Change]:
    for name in FIXED:
        value, free = getattr(limits, name), {name: None}
        if value is not None and fits(model, machines, freed := replace(limits, **free)):  # type: ignore[arg-type]
            yield Change(f"leave {name}={value} free", model, machines, freed)


def _find_freed(model: Model, machines: Machines, limits: Constraints, fits: Fits) -> str:
    return ", or ".join(change.text for change in _release_constraints(model, machines, limits, fits))


def _least(good: Callable[[int], bool], most: int) -> int | None:
    """Returns the smallest power of two from 2 to `most` for which `good` returns True; None: there is none."""
    n = 2
    while n <= most:
        if good(n):
            return n
        n *= 2
    return None


def _bisect(good: Callable[[int], bool], most: int) -> int:
    """Returns the largest number in [0, most) for which `good` returns True, by bisection; 0 is taken to be good."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _with_host(cluster: Cluster, pool: Pool, **changed: object) -> Machines:
    hosts = [msgspec.structs.replace(h, **changed) if h is pool.host else h for h in cluster.hosts]
    return Machines(msgspec.structs.replace(cluster, hosts=hosts))


def _with_device(cluster: Cluster, pool: Pool, memory_gb: float) -> Machines:
    devices = [msgspec.structs.replace(e, memory_gb=memory_gb) if e is pool.entry else e for e in pool.host.devices]
    return _with_host(cluster, pool, devices=devices)
