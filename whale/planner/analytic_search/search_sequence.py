"""Runs the whole search: on all devices, with each ZeRO level and offload as needed, and on parts of the cluster.

The steps always come in the same order, and the budget only decides after which one the search ends: a larger budget
never gives a slower plan, and a busy machine gives the same plan as an idle one.

Decisions: 0077, 0158, 0172, 0187, 0194, 0195, 0209, 0211, 0214, 0215, 0219, 0222, 0224, 0225.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from cost_model.analytic.evaluate import Evaluation
from cost_model.analytic.layer_costs import Model
from cost_model.cluster.cluster_file import Cluster, HostEntry
from cost_model.cluster.pools import Machines, Pool
from whale.errors import PlanError
from whale.ir.collector import suspend_garbage_collection
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Recompute
from whale.planner.analytic_search.candidates import Constraints, SearchResult
from whale.planner.analytic_search.estimate import divisors, least_s
from whale.planner.analytic_search.infeasible import nothing_fits
from whale.planner.analytic_search.moves import has_room
from whale.planner.analytic_search.search import BEHIND, NothingFits, Search
from whale.planner.analytic_search.simplicity import TIE, Complexity, find_front, is_simpler, measure_complexity
from whale.planner.analytic_search.work import OutOfWork, Work

# (ZeRO level, offload), from the fastest to the one that needs the least memory.
MODES: tuple[tuple[int, Offload], ...] = (
    (2, "none"), (3, "none"), (1, "optimizer"), (3, "optimizer"), (1, "parameters"), (3, "parameters"),
)  # fmt: skip
# How many strategies are improved: at first, on parts of the cluster, and at last in the best searches.
IMPROVED, IMPROVED_PART, IMPROVED_LAST = 5, 1, 8
# From how many other places the best search is begun anew, and the most work of it as a part of all work before: early,
# and before it is widened.
BEGUN, BEGUN_LAST = (8, 0.2), (24, 0.5)
ROUGHLY = 1.2  # candidates with another ZeRO level or context degree are tried up to this times the best step
ABOUT = 1.1  # ... and improved up to this times the best candidate's step
LEAST_TOKENS = 256  # least tokens of a row on each context-parallel rank
CLOSE = 1.03  # a strategy with another choice is polished if its step is below this times the best
OFFLOADS: tuple[Offload, ...] = ("optimizer", "parameters")  # tried where the best strategy recomputes
TAKEN_ALONG = 60  # strategies that a search takes over from one on more hosts, or with another context degree
GONE_ON = 3  # searches, those with the fastest strategies, on which more work is spent at the end
FAR = 1.25  # ... unless their fastest strategy takes more than this times the best one
FEWER = (2, 4, 8)  # one of so many devices of a host is used, where its adapters are too slow for more


def search(model: Model, machines: Machines, batch: int, limits: Constraints | None = None) -> SearchResult:
    """Finds the best strategy of a model's training step on a cluster.

    Args:
        batch: global batch: rows of one step over all ranks.
        limits: the user's constraints and the budget; None: all free, default budget.

    Raises:
        PlanError: no strategy fits, with any ZeRO level or offload. The error proposes changes, which take long to
            find.
    """
    sequence = _run_sequence(model, machines, batch, limits or Constraints())
    if not sequence.found:
        raise nothing_fits(sequence.searches, sequence.limits, partial(fits, batch))
    return sequence.make_result()


def find_best(model: Model, machines: Machines, batch: int, limits: Constraints) -> SearchResult | None:
    """Finds the best strategy like `search`, but returns None where no strategy fits."""
    sequence = _run_sequence(model, machines, batch, limits)
    return sequence.make_result() if sequence.found else None


def _run_sequence(model: Model, machines: Machines, batch: int, limits: Constraints) -> _Sequence:
    if batch < 1:
        raise PlanError(
            "the global batch must be positive",
            given=f"batch={batch}",
            expected="the number of rows of one step over all ranks, at least 1",
            action="give a batch of at least 1",
        )
    sequence = _Sequence(model, machines, batch, limits)
    with suspend_garbage_collection():  # a search keeps what it makes, and nearly all the rest is in no cycle
        try:
            sequence.run()
        except OutOfWork:
            sequence.cut = "the processor's time" if sequence.work.late else "the budget"
    return sequence


def fits(batch: int, model: Model, machines: Machines, limits: Constraints) -> bool:
    """Returns True if any strategy fits into memory; the search for one is not limited by a budget."""
    sequence = _Sequence(model, machines, batch, replace(limits, budget_s=0.0, exact_devices=0))
    try:
        sequence.run_on_all()
    except OutOfWork:
        pass
    return bool(sequence.found)


class _Sequence:
    """Holds the searches for one question, which share one budget of work, and runs them in order."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints) -> None:
        self.model, self.machines, self.batch, self.limits = model, machines, batch, limits
        self.work = Work(limits.budget_s)
        self.work.settle = self._settle
        self.work.convert = partial(self._convert_rows, closely=False)
        self.searches: list[Search] = []
        self.started_s, self.cut = time.monotonic(), ""
        self.fixed: ParallelStrategy | None = None  # the strategy for which `_fix_choices` tried other values

    @property
    def found(self) -> list[Search]:
        """Returns the searches that found a strategy that fits, the one with the fastest strategy first.

        Of several with the same strategy, the first is one whose choices are free.
        """
        found = [one for one in self.searches if one.fastest is not None]
        return sorted(found, key=lambda one: (one.fastest[1].step_s, one.limits != self._free(one)))  # type: ignore[index]

    def run(self) -> None:
        """Runs all steps of the sequence.

        Raises:
            OutOfWork: the budget is used up, and a strategy was found.
        """
        self.run_on_all()
        if not self.found:
            return
        first, now = self.found[0], self._leave_idle_out()
        gone_on = [now, first] if now.machines is first.machines else [now]
        now.refine()  # takes little, and the budget may end before a search goes on
        while self._convert_rows(closely=False):
            pass
        self.found[0].begin_anew(*BEGUN)
        now.go_on(IMPROVED)
        while self._convert_rows():
            pass
        self._fix_choices()
        tried = [self.machines.cluster]
        used = {pool.host.name for pool in self._list_used(self.found[0])}
        for cluster in _parts(self.machines.cluster, self.limits.exact_devices, used):
            own, known_s = Machines(cluster), self.found[0].fastest[1].step_s  # type: ignore[index]
            if cluster not in tried and least_s(own, self.batch, self._rates()) < known_s:
                tried.append(cluster)
                limits = replace(self.limits, context=self.found[0].limits.context, faster_than_s=known_s)
                self._begin(self.model.on(own), own, limits, IMPROVED_PART)
        for one in self.found[:GONE_ON]:
            if one not in gone_on and one.fastest[1].step_s < FAR * self.found[0].fastest[1].step_s:  # type: ignore[index]
                one.limits = replace(one.limits, faster_than_s=math.inf)
                one.go_on(IMPROVED)
                self._take_over(one)
        self.found[0].begin_anew(*BEGUN_LAST)
        for one in self.found[:GONE_ON]:
            one.widen(IMPROVED_LAST)
            self._take_over(one)
        self._fix_choices()

    def _free(self, one: Search) -> Constraints:
        """Returns the limits of a search without the choices that only the sequence has fixed; ranks that divide tokens
        and offload stay, since a search has one degree and one kind of them.
        """
        limits = one.limits
        return replace(self.limits, context=limits.context, offload=limits.offload, faster_than_s=limits.faster_than_s)

    def _settle(self, until_s: float) -> None:
        """Brings the best strategy to where small changes no longer help, or spends so many seconds of work on that.

        Searches explore for most of their time, and what they have found is then not at its best when the budget ends.
        """
        if not self.found[0].few:  # every assignment of few devices is tried
            self.found[0].settle(until_s)

    def _take_over(self, one: Search) -> None:
        """Continues with the fastest strategy of a search with fixed choices where these are free, if it is the fastest
        of all: what a fixed choice leads to may be better with another value in some stages.
        """
        free = self._free(one)
        if one is not self.found[0] or one.limits == free:
            return
        strategy, found = one.fastest  # type: ignore[misc]
        other = next((s for s in self.searches if s.machines is one.machines and s.limits == free), None)
        if other is None:
            other = Search(one.model, one.machines, self.batch, free, self.work, one.stage_costs)
            other.listed_s = found.step_s
            self.searches.append(other)
        took_s, _ = other.consider(strategy)
        if took_s < math.inf:
            other.go_on(IMPROVED)

    def _fix_choices(self) -> None:
        """Searches with one choice of the fastest strategy fixed to another value, as a person would try by hand.

        A faster result is then improved with all choices free.
        """
        best = self.found[0]
        if best.fastest[0] == self.fixed:  # type: ignore[index]
            return
        strategy, free = best.fastest[0], replace(best.limits, faster_than_s=math.inf)  # type: ignore[index]
        for name, value in _list_other_choices(strategy, best.model, best.machines, self.batch):
            if getattr(free, name) is not None:
                continue
            known_s = best.fastest[1].step_s  # type: ignore[index]
            limits = replace(free, **{name: value}, faster_than_s=ROUGHLY * known_s)  # type: ignore[arg-type]
            one = self._begin(best.model, best.machines, limits, IMPROVED_PART, ROUGHLY * best.listed_s)
            if one.fastest is not None and one.fastest[1].step_s < CLOSE * known_s:
                one.polish()  # the fastest strategy was polished too, so that both are compared at their best
            if name != "offload" and one.fastest is not None and one.fastest[1].step_s < known_s:
                took_s, fitted = best.consider(one.fastest[0])
                if took_s < known_s:
                    best.improve(fitted, took_s)
        self.fixed = best.fastest[0]  # type: ignore[index]

    def make_result(self) -> SearchResult:
        """Returns the chosen strategy of all searches, alternatives to it, and statistics."""
        fastest = self.found[0].fastest
        assert fastest is not None
        best, strategy, evaluation = self._choose(*fastest)
        others = {one: cost for other in self.found if other.machines.cluster is best.machines.cluster
                  for _, one, cost in other.kept.entries}  # fmt: skip
        others.pop(strategy, None)
        whole = [one for one in self.searches if one.machines is self.machines]
        bounds = [bound for one in whole if (bound := one.bound_s())]
        return SearchResult(
            strategy=strategy,
            evaluation=evaluation,
            others=sorted(others.items(), key=lambda e: e[1].step_s),
            misfits=best.misfits,
            estimated=sum(one.estimated for one in self.searches),
            simulated=sum(one.simulated for one in self.searches),
            seconds=time.monotonic() - self.started_s,
            work_s=self.work.used_s,
            bound_s=min([fastest[1].step_s, *bounds]),
            cut=self.cut,
            cluster=best.machines.cluster,
            fastest_s=fastest[1].step_s,
            simpler=[best.kept.simple[one][1:] for _, one, _ in _list_simpler(best, strategy)],
        )

    def _choose(
        self, strategy: ParallelStrategy, evaluation: Evaluation
    ) -> tuple[Search, ParallelStrategy, Evaluation]:
        """Returns the simplest strategy that is slower than the fastest by no more than a tie, as (its search,
        strategy, cost).
        """
        most_s = evaluation.step_s * (1 + TIE)
        self.work.may_end = False
        if self.limits.chunks is None:
            self.found[0].simplify(most_s)
        chosen = self.found[0], strategy, evaluation
        for one in self.found:
            able = [c for seconds, c, _ in _list_simpler(one, strategy) if seconds <= most_s]
            if able and is_simpler(able[-1], measure_complexity(chosen[1])):
                chosen = one, *one.kept.simple[able[-1]][1:]
        return chosen

    def _list_used(self, search: Search) -> list[Pool]:
        """Returns the pools that the fastest strategy of a search uses."""
        used = {part.pool for stage in search.fastest[0].stages for part in stage.parts}  # type: ignore[index]
        return [pool for pool in search.machines.pools if pool.number in used]

    def _leave_idle_out(self) -> Search:
        """Returns the search to continue with: one on only those hosts that the best search's fastest strategy uses.

        Fewer hosts leave fewer changes to try. The new search begins as one on a cluster that never had the other
        hosts, so that adding kinds of hosts to a cluster never gives a slower plan. The ZeRO level is free again,
        unless the user has fixed it, since the level that made the state fit need not be the fastest. If nothing would
        change, or the new search finds nothing, the best search itself is returned.
        """
        best = self.found[0]
        best.limits = replace(best.limits, faster_than_s=math.inf)
        # The level that made states fit need not be the fastest one.
        free = replace(best.limits, zero=self.limits.zero)
        names = {pool.host.name for pool in self._list_used(best)}
        hosts = [host for host in best.machines.cluster.hosts if host.name in names]
        if len(hosts) == len(best.machines.cluster.hosts) and free == best.limits:
            return best
        own = best.machines
        if len(hosts) < len(own.cluster.hosts):
            own = Machines(msgspec.structs.replace(own.cluster, hosts=hosts))
        kept = [pool.number for pool in best.machines.pools if pool.host.name in names]
        model = best.model if own is best.machines else self.model.on(own)
        one = Search(model, own, self.batch, free, self.work, best.stage_costs if own is best.machines else None)
        one.listed_s = best.listed_s
        self.searches.append(one)  # before it begins: what it has found counts, if the budget ends it
        if own is not best.machines:  # begin as a search on a cluster without these hosts does
            try:
                one.begin(IMPROVED_PART)
            except NothingFits:
                pass
        known = sorted(((seconds, strategy) for seconds, strategy, _ in best.kept.entries), key=lambda e: e[0])
        for _, strategy in known[:TAKEN_ALONG]:
            if all(part.pool in kept for stage in strategy.stages for part in stage.parts):
                one.consider(_renumber_pools(strategy, kept))
        return best if one.fastest is None else one

    def _rates(self) -> dict[tuple[str, float], float]:
        """Returns the most rows per second of one device, {(device name, share): rows/s}, from the searches on all
        devices.

        With context parallelism, a row that `context` ranks divide counts as one row.
        """
        found: dict[tuple[str, float], float] = {}
        for one in self.searches:
            if one.machines is self.machines:
                for kind, rate in one.rates().items():
                    found[kind] = max(found.get(kind, 0.0), rate / one.context)
        return found

    def run_on_all(self) -> None:
        """Searches on all devices.

        ZeRO 1 (and 0) without offload is tried first. If the result shows that memory is scarce (it recomputes,
        divides tensors or layers, or has several micro-batches), ZeRO 3 is tried too, and context parallelism with 2,
        4, ... ranks as long as that helps. If nothing fits, all ZeRO levels are tried, with offload of state
        and weights where the cluster file gives the hosts' memory. With fewer rows than devices, candidates with all
        context-parallel degrees are listed before any is improved, since the best plan may need context parallelism.
        """
        few_rows = self.batch < self.machines.devices
        below_s = 0.0 if few_rows else math.inf
        first = self._begin(self.model, self.machines, self.limits, IMPROVED, below_s, exactly=False)
        divided = self._divide_rows() if self._is_bound() else []
        self._improve_listed([first, *divided] if few_rows else divided)
        for zero, offload in self._modes():
            known_s = ROUGHLY * self.found[0].fastest[1].step_s if self.found else math.inf  # type: ignore[index]
            context = self.found[0].limits.context if self.found else self.limits.context
            limits = replace(self.limits, zero=zero, offload=offload, context=context, faster_than_s=known_s)
            listed_s = min(one.listed_s for one in self.searches)
            self._begin(self.model, self.machines, limits, IMPROVED, ABOUT * listed_s, exactly=False)
        for one in self.found:  # takes longest, so that all else was looked at if the budget ends it
            one.look_at_all()

    def _is_bound(self) -> bool:
        """Returns True if memory seems scarce: nothing fits yet, or the fastest strategy divides tensors or layers,
        recomputes, or has several micro-batches, of which fewer may not fit.
        """
        if not self.found:
            return True
        s = self.found[0].fastest[0]  # type: ignore[index]
        parts = [part for stage in s.stages for part in stage.parts]
        divided = len(s.stages) > 1 or s.micro_batches > 1 or any(part.tensor > 1 for part in parts)
        return divided or set(s.recomputes) != {"none"}

    def _improve_listed(self, listed: Sequence[Search]) -> None:
        """Improves the candidates of several searches, the best search first, and skips searches that are far
        behind.
        """
        able = sorted((one for one in listed if one.fastest is not None), key=lambda one: one.listed_s)
        best_s = min([one.listed_s for one in self.searches])
        for number, one in enumerate(able):
            if one.listed_s <= (BEHIND if one.context == 1 else ABOUT) * best_s:
                one.improve_listed(IMPROVED_PART if number else IMPROVED)

    def _divide_rows(self) -> list[Search]:
        """Lists candidates with context-parallel degree 2, 4, ... until the best step no longer gets shorter."""
        tokens, found = self.model.sequence, list[Search]()
        if self.limits.context is not None:
            return found
        context, listed_s = 2, min(one.listed_s for one in self.searches)
        while tokens % context == 0 and tokens // context >= LEAST_TOKENS and context <= self.machines.devices:
            known_s = self.found[0].fastest[1].step_s if self.found else math.inf  # type: ignore[index]
            limits = replace(self.limits, context=context, faster_than_s=ROUGHLY * known_s)
            one = self._begin(self.model, self.machines, limits, 0, below_s=0.0)
            found.append(one)
            if one.listed_s > listed_s:
                break
            context, listed_s = 2 * context, one.listed_s
        return found

    def _convert_rows(self, closely: bool = True) -> bool:
        """Tries the fastest strategies with half and twice their context-parallel degree, with their tensor-parallel
        degrees and with others that keep the devices, and continues with a faster result.

        Args:
            closely: improve a converted strategy that is nearly as fast before it is compared, since parts of rows can
                be divided into micro-batches more finely than rows, and spend more work on a faster one.

        Returns:
            True if a result is faster, so that another degree may be faster still.
        """
        best = self.found[0]
        known_s = best.fastest[1].step_s  # type: ignore[index]
        for context in (best.context // 2, 2 * best.context) if self.limits.context is None else ():
            tokens = self.model.sequence
            if not context or tokens % context or tokens // context < LEAST_TOKENS:
                continue
            limits = replace(best.limits, context=context)
            one = Search(best.model, best.machines, self.batch, limits, self.work, best.stage_costs)
            one.listed_s = best.listed_s
            self.searches.append(one)  # before it begins: what it has found counts, if the budget ends it
            known = sorted(((seconds, strategy) for seconds, strategy, _ in best.kept.entries), key=lambda e: e[0])
            most_s = CLOSE * known_s if closely else known_s
            for _, strategy in known[:TAKEN_ALONG]:
                for converted in _list_conversions(strategy, context, best.model.experts):
                    ranks = [stage.parts for stage in converted.stages]
                    if all(map(one.moves.allows, ranks)) and has_room(one.machines, ranks):
                        one.consider(converted, most_s)
            if one.fastest is not None and one.fastest[1].step_s < most_s:
                if closely:
                    one.improve_listed(IMPROVED_PART)
                if one.fastest[1].step_s < known_s:
                    one.go_on(IMPROVED) if closely else one.refine()
                    return True
            self.searches.remove(one)
        return False

    def _begin(
        self,
        model: Model,
        machines: Machines,
        limits: Constraints,
        improved: int,
        below_s: float = math.inf,
        exactly: bool = True,
    ) -> Search:
        like = next((one for one in self.searches if one.model is model and one.machines is machines), None)
        one = Search(model, machines, self.batch, limits, self.work, like.stage_costs if like else None)
        self.searches.append(one)
        try:
            one.begin(improved, below_s, exactly)
        except NothingFits:
            pass
        return one

    def _modes(self) -> list[tuple[int, Offload]]:
        """Returns further (ZeRO level, offload) pairs that are worth a search and that the user leaves free."""
        limits, bound = self.limits, self._is_bound()
        if self.found:
            return [(3, "none")] if bound and limits.zero is None and limits.offload in (None, "none") else []
        hosts = all(pool.host_bytes for pool in self.machines.pools)
        return [
            (zero, offload)
            for zero, offload in MODES
            if limits.zero in (None, zero) and limits.offload in (None, offload) and (offload == "none" or hosts)
        ]


def _list_simpler(search: Search, than: ParallelStrategy) -> list[tuple[float, Complexity, ParallelStrategy]]:
    """Returns (seconds, complexity, strategy) of a search's strategies that are simpler than `than` (see
    `find_front`).
    """
    others = ((seconds, key, strategy) for key, (seconds, strategy, _) in search.kept.simple.items())
    return find_front(others, measure_complexity(than))


def _list_other_choices(
    strategy: ParallelStrategy, model: Model, machines: Machines, batch: int
) -> Iterator[tuple[str, int | Recompute | Offload]]:
    """Yields (name of a constraint, value) for choices that `strategy` did not make, such as ("stages", 4).

    Stages, replicas, tensor degrees and rows come in turn, values near the strategy's own first; recompute, chunks,
    offload, which no move changes, and ZeRO level, which single moves reach as well, come last.
    """
    parts = [part for stage in strategy.stages for part in stage.parts]
    stages, rows, chunks = len(strategy.stages), parts[0].rows, strategy.chunks
    tensors = {tensor for part in parts for tensor in model.tensor_degrees(part.pool)} - {part.tensor for part in parts}
    data, most = strategy.stages[0].replicas // strategy.context, min(model.count, machines.devices)
    near = dict.fromkeys((stages // 2, 2 * stages, stages - 1, stages + 1, 1))
    pools = {part.pool for part in strategy.stages[0].parts}
    whole = [n for pool in pools for n in machines.pools[pool].list_whole_hosts(strategy.tensor, data)]
    replicas = (data // 2, 2 * data, *_next_to(data, divisors(batch)), *whole, 4 * data, data // 4)
    in_turn: list[list[tuple[str, int | Recompute]]] = [
        [("stages", n) for n in near if 0 < n <= most and n != stages],
        [("data", n) for n in dict.fromkeys(replicas) if n],
        [("tensor", n) for n in sorted(tensors, key=lambda one: abs(one - strategy.tensor))],
        [("micro_batch", n) for n in (rows // 2, 2 * rows) if n],
    ]
    yield from (one for row in itertools.zip_longest(*in_turn) for one in row if one is not None)
    yield from (("recompute", how) for how, _ in model.recomputes() if {how} != set(strategy.recomputes))
    if stages > 1:
        other = dict.fromkeys((chunks // 2, 1, 2, chunks + 1, chunks - 1, 2 * chunks))
        yield from (("chunks", n) for n in other if n > 0 and n != chunks)
    if set(strategy.recomputes) != {"none"} and all(pool.host_bytes for pool in machines.pools):
        yield from (("offload", one) for one in OFFLOADS if one != strategy.offload)  # needs no recomputation, maybe
    yield from (("zero", level) for level in range(4) if level != strategy.zero)


def _next_to(one: int, numbers: Sequence[int]) -> list[int]:
    """Returns the next larger and the next smaller member of the ascending `numbers`, as far as they exist."""
    above, below = [n for n in numbers if n > one][:1], [n for n in numbers if n < one][-1:]
    return [*above, *below]


def _list_conversions(strategy: ParallelStrategy, context: int, experts: int) -> Iterator[ParallelStrategy]:
    """Yields the strategy with context-parallel degree `context`: with as many replicas, which have more (or fewer)
    rows or micro-batches, and on the same devices with fewer (or more) of them to divide tensors. `Moves.allows` says
    which of them are legal.
    """
    if (divided := _divide_tokens(strategy, context)) is not None:
        yield divided
    micro_batches, odd = divmod(strategy.micro_batches * context, strategy.context)
    if not odd:
        yield msgspec.structs.replace(strategy, context=context, micro_batches=micro_batches)
    if (exchanged := exchange_ranks(strategy, context, experts)) is not None:
        yield exchanged
        if exchanged.expert_ranks != strategy.expert_ranks:
            yield msgspec.structs.replace(exchanged, expert_ranks=strategy.expert_ranks)


def _divide_tokens(strategy: ParallelStrategy, context: int) -> ParallelStrategy | None:
    """Returns the strategy with context-parallel degree `context` and as many replicas; None: rows or replicas do not
    divide.
    """
    stages = []
    for stage in strategy.stages:
        parts = []
        for part in stage.parts:
            rows, odd = divmod(part.rows * context, strategy.context)
            if odd or part.replicas % context:
                return None
            parts.append(msgspec.structs.replace(part, rows=rows))
        if context > 1 and len({part.rows for part in parts}) > 1:
            return None
        stages.append(msgspec.structs.replace(stage, parts=tuple(parts)))
    return msgspec.structs.replace(strategy, context=context, stages=tuple(stages))


def exchange_ranks(strategy: ParallelStrategy, context: int, experts: int) -> ParallelStrategy | None:
    """Returns the strategy with context-parallel degree `context` on the same devices, of which fewer (or more) divide
    tensors in return, and with as many of a layer's `experts` on each device, where that divides them; None: a
    tensor-parallel degree does not divide.
    """
    stages = []
    for stage in strategy.stages:
        parts = []
        for part in stage.parts:
            tensor, odd = divmod(part.tensor * strategy.context, context)
            if odd:
                return None
            parts.append(DeviceGroup(part.pool, tensor, part.replicas // strategy.context * context, part.rows))
        stages.append(msgspec.structs.replace(stage, parts=tuple(parts)))
    ways = strategy.expert_ranks * context // strategy.context
    if ways and experts % ways:
        ways = strategy.expert_ranks
    return msgspec.structs.replace(strategy, context=context, expert_ranks=ways, stages=tuple(stages))


def _renumber_pools(strategy: ParallelStrategy, kept: Sequence[int]) -> ParallelStrategy:
    """Returns the strategy with pool numbers of a cluster that has only the pools `kept` (old numbers, in order)."""
    number = {old: new for new, old in enumerate(kept)}
    stages = tuple(
        msgspec.structs.replace(
            stage, parts=tuple(msgspec.structs.replace(part, pool=number[part.pool]) for part in stage.parts)
        )
        for stage in strategy.stages
    )
    return msgspec.structs.replace(strategy, stages=stages)


def _parts(cluster: Cluster, few: int, used: Collection[str]) -> Iterator[Cluster]:
    """Yields parts of a cluster that may be faster than all of it.

    For each kind of host: so few hosts that an exhaustive search is possible. If several devices of a host share a
    network adapter: half, a quarter and an eighth of the devices of all hosts, and of each such kind of host.

    Args:
        few: largest number of devices for an exhaustive search.
        used: names of the hosts that the best strategy uses; fewer devices on other hosts do not speed it up.
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
    for chosen in (None, *(host for host in crowded if host.name in used)) if crowded else ():
        for part in FEWER:
            hosts = [part_of(h, part) if chosen in (None, h) else h for h in cluster.hosts]
            yield msgspec.structs.replace(cluster, hosts=hosts)
