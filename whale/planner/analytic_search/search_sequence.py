"""Runs the whole search: strategies of all devices, ways to divide or offload the state, and fewer devices.

All of it is one sequence of steps, and the budget says only where it ends: a larger budget never gives a slower plan,
and a busy machine plans the same as an idle one.

Decisions: 0077, 0158.
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
from whale.planner.analytic_search.estimate import least_s
from whale.planner.analytic_search.infeasible import nothing_fits
from whale.planner.analytic_search.search import NothingFits, Search
from whale.planner.analytic_search.work import OutOfWork, Work

# (ZeRO level, offload), from what costs least to what takes least memory.
MODES: tuple[tuple[int, Offload], ...] = (
    (2, "none"), (3, "none"), (1, "optimizer"), (3, "optimizer"), (1, "parameters"), (3, "parameters"),
)  # fmt: skip
# Strategies that are improved: at first, on parts of the cluster, and at last of the searches that found the best.
IMPROVED, IMPROVED_PART, IMPROVED_LAST = 4, 1, 8
ROUGHLY = 1.2  # times the best step that an estimate of another kind of ZeRO may be
GONE_ON = 3  # searches that are gone on with, of those with the best strategies
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
    sequence = _Sequence(model, machines, batch, limits)
    try:
        sequence.run()
        cut = ""
    except OutOfWork:
        cut = "the processor's time" if sequence.work.late else "the budget"
    found = sequence.found
    if not found:
        raise nothing_fits(sequence.searches, limits, partial(fits, batch))
    best = found[0]
    strategy, evaluation = best.fastest  # type: ignore[misc]
    others = {one: cost for other in found if other.machines.cluster is best.machines.cluster
              for _, one, cost in other.kept.entries}  # fmt: skip
    others.pop(strategy, None)
    whole = [one for one in sequence.searches if one.machines is machines]
    bounds = [bound for one in whole if (bound := one.bound_s())]
    return SearchResult(
        strategy=strategy,
        evaluation=evaluation,
        others=sorted(others.items(), key=lambda e: e[1].step_s),
        misfits=best.misfits,
        estimated=sum(one.estimated for one in sequence.searches),
        simulated=sum(one.simulated for one in sequence.searches),
        seconds=time.monotonic() - started,
        work_s=sequence.work.used_s,
        bound_s=min([evaluation.step_s, *bounds]),
        cut=cut,
        cluster=best.machines.cluster,
    )


def fits(batch: int, model: Model, machines: Machines, limits: Constraints) -> bool:
    """Tells whether a search finds any strategy that fits, however long that takes."""
    sequence = _Sequence(model, machines, batch, replace(limits, budget_s=0.0, exact_devices=0))
    try:
        sequence.run_on_all()
    except OutOfWork:
        pass
    return bool(sequence.found)


class _Sequence:
    """The searches of a sequence, with the work that they do together."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints) -> None:
        self.model, self.machines, self.batch, self.limits = model, machines, batch, limits
        self.work = Work(limits.budget_s)
        self.searches: list[Search] = []

    @property
    def found(self) -> list[Search]:
        """Returns the searches that found something, the fastest first."""
        found = [one for one in self.searches if one.fastest is not None]
        return sorted(found, key=lambda one: one.fastest[1].step_s)  # type: ignore[index]

    def run(self) -> None:
        """Does all steps; raises OutOfWork where the budget ends it, once something is found."""
        self.run_on_all()
        if not self.found:
            return
        tried = [self.machines.cluster]
        for cluster in _parts(self.machines.cluster, self.limits.exact_devices):
            own, known_s = Machines(cluster), self.found[0].fastest[1].step_s  # type: ignore[index]
            if cluster not in tried and least_s(own, self.batch, self._rates()) < known_s:
                tried.append(cluster)
                self._begin(self.model.on(own), own, replace(self.limits, faster_than_s=known_s), IMPROVED_PART)
        for one in self.found[:GONE_ON]:
            one.limits = replace(one.limits, faster_than_s=math.inf)
            one.go_on(IMPROVED_LAST)

    def _rates(self) -> dict[tuple[str, float], float]:
        """Returns the rows a second of a device of each kind, at most, in the searches on all devices."""
        found: dict[tuple[str, float], float] = {}
        for one in self.searches:
            if one.machines is self.machines:
                for kind, rate in one.rates().items():
                    found[kind] = max(found.get(kind, 0.0), rate)
        return found

    def run_on_all(self) -> None:
        """Searches on all devices.

        ZeRO 1 (and 0) without offload is tried first. If memory is a bottleneck there (recompute, tensors or layers
        divided), ZeRO 3 is tried as well; if no strategy fits, all levels are, with state and weights offloaded as
        far as the hosts' memory is known.
        """
        self._begin(self.model, self.machines, self.limits, IMPROVED)
        for zero, offload in self._modes():
            known_s = ROUGHLY * self.found[0].fastest[1].step_s if self.found else math.inf  # type: ignore[index]
            limits = replace(self.limits, zero=zero, offload=offload, faster_than_s=known_s)
            self._begin(self.model, self.machines, limits, IMPROVED)

    def _begin(self, model: Model, machines: Machines, limits: Constraints, improved: int) -> None:
        one = Search(model, machines, self.batch, limits, self.work)
        self.searches.append(one)
        try:
            one.begin(improved)
        except NothingFits:
            pass

    def _modes(self) -> list[tuple[int, Offload]]:
        """Returns the other (ZeRO level, offload) pairs that are worth a search and that the user leaves free."""
        limits = self.limits
        if self.found:
            s = self.found[0].fastest[0]  # type: ignore[index]
            parts = [part for stage in s.stages for part in stage.parts]
            bound = set(s.recomputes) != {"none"} or len(s.stages) > 1 or any(part.tensor > 1 for part in parts)
            return [(3, "none")] if bound and limits.zero is None and limits.offload in (None, "none") else []
        hosts = all(pool.host_bytes for pool in self.machines.pools)
        return [
            (zero, offload)
            for zero, offload in MODES
            if limits.zero in (None, zero) and limits.offload in (None, offload) and (offload == "none" or hosts)
        ]


def _parts(cluster: Cluster, few: int) -> Iterator[Cluster]:
    """Yields clusters with some devices of each host, for all hosts or for one kind of host, where a host's devices
    share its adapters.

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
    crowded = [
        host
        for host in cluster.hosts
        if any(one.nics < sum(entry.count for entry in host.devices) for one in host.networks.values())
    ]
    for chosen in (None, *crowded) if crowded else ():
        for part in FEWER:
            hosts = [part_of(h, part) if chosen in (None, h) else h for h in cluster.hosts]
            yield msgspec.structs.replace(cluster, hosts=hosts)
