"""Runs the whole search: rounds of growing effort, ways to divide or offload the state, and fewer devices.

A round with a given budget is the same whatever the total budget is, and the best of all rounds is returned: a larger
budget never gives a slower result. Results depend on the clock only where a round is cut short.

Decision: 0077.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec

from cost_model.analytic.layer_costs import Model
from cost_model.cluster.cluster_file import Cluster, HostEntry
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.strategy import Offload
from whale.planner.analytic_search.candidates import Constraints, SearchResult
from whale.planner.analytic_search.infeasible import nothing_fits
from whale.planner.analytic_search.search import NothingFits, Search

# (ZeRO level, offload), from what costs least to what takes least memory.
MODES: tuple[tuple[int, Offload], ...] = (
    (2, "none"), (3, "none"), (1, "optimizer"), (3, "optimizer"), (1, "parameters"), (3, "parameters"),
)  # fmt: skip
LEAST_BUDGET = 0.2  # part of a round that a further mode has
FIRST_ROUND_S, SECOND_ROUND_S = 0.5, 1.5  # each further one is as long as all before it
LEAST_FEWER_S = 0.2  # for parts of the cluster, at least
FITS_S = 0.2  # after which a search that has found something is content
FEWER = (2, 4, 8)  # of so many devices of a host one is used, where a host's adapters or links are too slow for more


def search(model: Model, machines: Machines, batch: int, limits: Constraints | None = None) -> SearchResult:
    """Finds the best strategy of a model's training step over a cluster (see `Search`).

    Raises:
        PlanError: no strategy fits, with any division or offload of state.
    """
    if batch < 1:
        raise PlanError("the global batch must be positive", given=batch)
    limits = limits or Constraints()
    started = time.monotonic()
    found: list[SearchResult] = []
    failed: list[NothingFits] = []
    hurried = machines.devices > limits.exact_devices and not limits.hurried
    for budget_s in rounds_s(limits.budget_s):
        one = _round(
            model, machines, batch, replace(limits, budget_s=budget_s, hurried=hurried or limits.hurried), failed
        )
        found += [] if one is None else [one]
        if (one is None or one.exhausted) and not hurried:
            break
        hurried = hurried and one is not None and not one.exhausted
    if not found:  # whatever it takes: that nothing fits is not said of what was not looked at
        failed.clear()
        one = _round(model, machines, batch, replace(limits, budget_s=float("inf"), hurried=True), failed)
        if one is None:
            raise nothing_fits([error.search for error in failed], limits, partial(fits, batch))
        found.append(one)
    exhausted = found[-1].exhausted
    found += _fewer(model, machines, batch, limits, started, min(one.evaluation.step_s for one in found))
    best = min(found, key=lambda f: f.evaluation.step_s)
    others = {strategy: evaluation for f in found if f.cluster is best.cluster for strategy, evaluation in f.others}
    others |= {f.strategy: f.evaluation for f in found if f.cluster is best.cluster}
    others.pop(best.strategy, None)
    return replace(
        best,
        others=sorted(others.items(), key=lambda e: e[1].step_s),
        estimated=sum(f.estimated for f in found),
        simulated=sum(f.simulated for f in found),
        seconds=time.monotonic() - started,
        bound_s=min(f.bound_s for f in found if f.cluster is machines.cluster),
        exhausted=exhausted,
    )


def rounds_s(budget_s: float) -> Iterator[float]:
    """Yields the budget of each round; without a total budget, rounds have none either."""
    if math.isinf(budget_s):
        yield from (budget_s, budget_s)
        return
    yield min(budget_s, FIRST_ROUND_S)
    used_s, next_s = FIRST_ROUND_S, SECOND_ROUND_S
    while used_s + next_s <= budget_s:
        yield next_s
        used_s += next_s
        next_s = used_s


def _round(
    model: Model, machines: Machines, batch: int, limits: Constraints, failed: list[NothingFits]
) -> SearchResult | None:
    """Runs one round and returns the best result of all modes; None if no strategy tried fits.

    ZeRO 1 (and 0) without offload is tried first. If memory is a bottleneck there (recompute, tensors or layers
    divided), ZeRO 3 is tried as well; if no strategy fits, all levels are, with state and weights offloaded as
    far as the hosts' memory is known.
    """
    started = time.monotonic()
    found: list[SearchResult] = []

    def look(one: Constraints) -> None:
        try:
            found.append(Search(model, machines, batch, one).run())
        except NothingFits as error:
            failed.append(error)

    look(limits)
    modes = _modes(machines, limits, found[0] if found else None)
    late = False
    for number, (zero, offload) in enumerate(modes):
        left_s = limits.budget_s - (time.monotonic() - started)
        late = bool(found) and left_s < LEAST_BUDGET * limits.budget_s
        if late:
            break
        own_s = max(left_s / (len(modes) - number), LEAST_BUDGET * limits.budget_s)
        look(replace(limits, zero=zero, offload=offload, budget_s=own_s))
    if not found:
        return None
    best = min(found, key=lambda f: f.evaluation.step_s)
    return replace(
        best,
        others=[*best.others, *((f.strategy, f.evaluation) for f in found if f is not best)],
        estimated=sum(f.estimated for f in found),
        simulated=sum(f.simulated for f in found),
        bound_s=min(f.bound_s for f in found),
        exhausted=not late and all(f.exhausted for f in found),
    )


def fits(batch: int, model: Model, machines: Machines, limits: Constraints) -> bool:
    """Tells whether a search finds any strategy that fits, however long that takes."""
    return (
        _round(model, machines, batch, replace(limits, budget_s=FITS_S, hurried=True, exact_devices=0), []) is not None
    )


def _modes(machines: Machines, limits: Constraints, found: SearchResult | None) -> list[tuple[int, Offload]]:
    """Returns the other (ZeRO level, offload) pairs that are worth a search and that the user leaves free."""
    if found is not None:
        s = found.strategy
        bound = (
            set(s.recomputes) != {"none"} or len(s.stages) > 1 or any(p.tensor > 1 for t in s.stages for p in t.parts)
        )
        return [(3, "none")] if bound and limits.zero is None and limits.offload in (None, "none") else []
    hosts = all(pool.host_bytes for pool in machines.pools)
    return [
        (zero, offload)
        for zero, offload in MODES
        if limits.zero in (None, zero) and limits.offload in (None, offload) and (offload == "none" or hosts)
    ]


def _fewer(
    model: Model, machines: Machines, batch: int, limits: Constraints, started: float, known_s: float
) -> Iterator[SearchResult]:
    """Yields results that are faster on a part of the cluster than on all of it.

    It searches for as long as the rounds have taken, within the budget.
    """
    tried = [machines.cluster]
    taken_s = time.monotonic() - started
    most_s = limits.budget_s if math.isinf(limits.budget_s) else min(limits.budget_s, 2 * taken_s + LEAST_FEWER_S)
    for cluster in _parts(machines.cluster, limits.exact_devices):
        left_s = most_s - (time.monotonic() - started)
        if cluster in tried or left_s <= 0:
            continue
        tried.append(cluster)
        own = Machines(cluster)
        less = replace(limits, budget_s=left_s, hurried=own.devices > limits.exact_devices, faster_than_s=known_s)
        one = _round(model.on(own), own, batch, less, [])
        if one is not None and one.evaluation.step_s < known_s:
            known_s = one.evaluation.step_s
            yield one


def _parts(cluster: Cluster, few: int) -> Iterator[Cluster]:
    """Yields clusters with some devices of each host, for all hosts or for one kind of host.

    For a kind of host, clusters small enough for an exhaustive search are included.
    """

    def part_of(host: HostEntry, part: int) -> HostEntry:
        devices = [msgspec.structs.replace(e, count=max(1, e.count // part)) for e in host.devices]
        return msgspec.structs.replace(host, devices=devices)

    for host in cluster.hosts:
        each = sum(entry.count for entry in host.devices)
        if each <= few < cluster.device_count:
            alone = msgspec.structs.replace(host, count=min(host.count, few // each))
            yield msgspec.structs.replace(cluster, hosts=[alone])
    for chosen in (None, *cluster.hosts):
        for part in FEWER:
            hosts = [part_of(h, part) if chosen in (None, h) else h for h in cluster.hosts]
            yield msgspec.structs.replace(cluster, hosts=hosts)
