"""Searches for the fastest strategy: estimates rank many, the best are cut into stages, the best of these are
simulated.

The families of strategies together contain the strategies known to be good:

* pure: every stage is on one pool, all stages have equally many replicas; pools get stages in proportion to speed;
* mixed: every stage has replicas on several pools, whose rows are divided by their speed (one stage: data parallelism
  over unequal devices);
* exact: for few devices, every assignment of devices to stages (see `whale.planner.analytic_search.exact`).

Within a family an estimate costs microseconds: the layers' seconds over the ranks' speed, the pipeline's bubble, the
reduction. Repeated layers are computed once. Candidates with the best estimates are cut by `layer_partition`, then
simulated.

Decision: 0048.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stage_cache import StageCosts
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, count_live_chunks
from whale.planner.analytic_search.candidates import Candidate, Constraints, SearchResult
from whale.planner.analytic_search.enumerate_candidates import Families
from whale.planner.analytic_search.exact import exact
from whale.planner.analytic_search.layer_partition import Chain
from whale.planner.analytic_search.neighbours import StageRanks, neighbours, other_orders, other_ranks, with_idle
from whale.planner.analytic_search.recompute_stages import RecomputeChoice


@dataclass(frozen=True)
class _Effort:
    """The number of strategies that each phase of a search processes.

    Attributes:
        cut: candidates whose layers are cut.
        simulated: of those, the best by their passes.
        misfits: candidates that do not fit, evaluated for the list of alternatives.
    """

    cut: int
    simulated: int
    misfits: int


THOROUGH, HURRIED = _Effort(cut=40, simulated=24, misfits=8), _Effort(cut=8, simulated=2, misfits=0)
# Spreads that are improved: with few devices a simulation costs next to nothing, and of the first ones stages may get
# other ranks.
IMPROVED, IMPROVED_FEW, IMPROVED_WIDELY = 4, 100, 40
CUT_ANEW = 16  # stages at most of a strategy that may get one more, on devices that are idle, or another order
# Parts of the budget after which a step of the search ends: listing candidates, cutting them, simulating the best.
LISTED, CUT, SIMULATED = 0.6, 0.75, 0.85
BEHIND = 1.3  # what is estimated at so many times the best is not looked at
LISTED_AT_ONCE = 64  # candidates between two looks at the clock
MISFITS = 50  # that are kept, of at most...
MISFIT_PASSES = 5000  # ...so many passes of a step, which take long to play
SHORTER = 1e-9  # part by which a step must be shorter than another to count as faster, against rounding


@dataclass
class _Simulated:
    """The simulated strategies: (seconds, strategy, evaluation) of those that fit, and keys of all that were
    simulated.
    """

    entries: list[tuple[float, ParallelStrategy, Evaluation]] = field(default_factory=list)
    seen: set[ParallelStrategy] = field(default_factory=set)


class NothingFits(Exception):
    """Raised when no strategy that a search tried fits into memory."""

    def __init__(self, search: Search) -> None:
        super().__init__("nothing fits")
        self.search = search


class Search(Families):
    """Searches strategies of a model on a cluster with a fixed global batch."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints) -> None:
        super().__init__(model, machines, batch, limits)
        self.stage_costs = StageCosts(model, machines)
        self.simulated = 0
        self.candidates: list[Candidate] = []
        self.kept = _Simulated()
        self.fastest: tuple[ParallelStrategy, Evaluation] | None = None
        self.misfits: list[tuple[ParallelStrategy, Evaluation]] = []
        self.recompute = RecomputeChoice(model, machines, self.ranks)
        # With few devices, what a stage may lie on, by micro-batches and sequence parallelism.
        self.choices: dict[tuple[int, bool], list[StageRanks]] = {}
        self.ordered: set[tuple[ParallelStrategy, tuple[tuple[DeviceGroup, ...], ...]]] = (
            set()
        )  # (settings, ranks) that have been cut

    def build(self, one: Candidate) -> ParallelStrategy | None:
        """Cuts the candidate's layers into stages; None if it does not fit into memory.

        A stage uses the candidate's recompute, or less.
        """
        if one.chunks > 1:
            return self.fitted(one.even(self.model.count))
        kinds = self.recompute_kinds(one.settings.sequence_parallel)
        kinds = kinds[: kinds.index(one.settings.recompute) + 1]
        strategy = self._cut(one.settings, one.ranks, kinds)
        return None if strategy is None else self.fitted(strategy)

    def _cut(
        self,
        settings: ParallelStrategy,
        ranks: Sequence[tuple[DeviceGroup, ...]],
        kinds: Sequence[Recompute] | None = None,
    ) -> ParallelStrategy | None:
        """Cuts layers into stages on these ranks, in order, as fast as possible; None if they do not fit.

        Args:
            settings: the strategy's settings; its stages, if it has any, are ignored.
            kinds: the kinds of recompute that a stage may use; None: all allowed ones.
        """
        kinds = self.recompute_kinds(settings.sequence_parallel) if kinds is None else kinds
        chain = Chain(self.model, self.machines, ranks, settings, self.ranks, kinds)
        ends = chain.best()
        return None if ends is None else chain.strategy(ends)

    def fitted(self, strategy: ParallelStrategy) -> ParallelStrategy:
        """Returns the strategy with as little recomputation in every stage as its memory allows."""
        kinds = self.recompute_kinds(strategy.sequence_parallel)
        return self.recompute.fitted(strategy, kinds, lambda index: self.live(strategy, index))

    def consider(self, strategy: ParallelStrategy) -> float:
        """Simulates and records a strategy; returns its step's seconds, infinite if it does not fit or was simulated
        before.
        """
        if self.limits.zero is None and strategy.zero and all(stage.replicas == 1 for stage in strategy.stages):
            strategy = msgspec.structs.replace(strategy, zero=0)  # there is nobody to share the state with
        strategy = self.fitted(strategy)
        if strategy in self.kept.seen or not self.keeps_choices(strategy):
            return float("inf")
        self.kept.seen.add(strategy)
        found = evaluate(self.model, self.machines, strategy, self.stage_costs)
        self.simulated += 1
        if not found.fits:
            if len(self.misfits) < MISFITS:
                self.misfits.append((strategy, found))
            return float("inf")
        if self.fastest is None or found.step_s < self.fastest[1].step_s:
            self.fastest = strategy, found
        self.kept.entries.append((found.step_s, strategy, found))
        return found.step_s

    def improve(self, strategy: ParallelStrategy, seconds: float, wide: bool) -> None:
        """Moves to the best neighbour while the simulated step gets shorter; `wide`: also tries other ranks for one
        stage.
        """
        if strategy.chunks > 1:
            return
        few = self.ranks <= self.limits.exact_devices
        while True:
            best = strategy, seconds
            others = itertools.chain(neighbours(strategy, few), () if few else self._reordered(strategy))
            if wide:
                choices = self.choices.get((strategy.micro_batches, strategy.sequence_parallel), [])
                more = self.limits.stages is None
                others = itertools.chain(others, other_ranks(strategy, self.machines, choices, more))
            for other in others:
                if self.late():
                    break
                if other not in self.kept.seen and (took := self.consider(other)) < best[1] * (1 - SHORTER):
                    best = other, took
            if best[0] is strategy:
                return
            strategy, seconds = best

    def _reordered(self, strategy: ParallelStrategy) -> Iterator[ParallelStrategy]:
        """Yields the strategy with its stages' ranks in other orders, and layers cut again.

        Families put the devices with the most memory first, because the first stages keep the most activations. If
        memory suffices, the extra work of the first and last layer (embedding, loss) may be cheaper on other devices.
        """
        if len(strategy.stages) > CUT_ANEW:
            return
        settings = msgspec.structs.replace(strategy, stages=())
        for ranks in other_orders([stage.parts for stage in strategy.stages]):
            if (key := (settings, tuple(ranks))) in self.ordered or self.late():
                continue
            self.ordered.add(key)
            if (found := self._cut(settings, ranks)) is not None:
                yield found

    def _beginnings(self) -> list[tuple[float, ParallelStrategy]]:
        """Returns the strategies to improve first: the best of each number of stages and micro-batches, then the
        others.
        """
        first: dict[tuple[int, int], tuple[float, ParallelStrategy]] = {}
        others = []
        for seconds, strategy, _ in sorted(self.kept.entries, key=lambda e: e[0]):
            key = (len(strategy.stages), strategy.micro_batches)
            if key in first:
                others.append((seconds, strategy))
            else:
                first[key] = (seconds, strategy)
        if self.ranks > self.limits.exact_devices:
            return sorted([*first.values(), *others], key=lambda e: e[0])
        return [*first.values(), *others]

    def run(self) -> SearchResult:
        """Searches until the budget is used or no candidate is left.

        Raises:
            NothingFits: no strategy fits.
        """
        candidates: list[Candidate] = []
        for family in (self.pure, self.mixed):
            for one in family():
                candidates.append(one)
                if len(candidates) % LISTED_AT_ONCE == 0 and self.late(LISTED):
                    break
        candidates.sort(key=lambda c: c.estimate_s)
        self._try(candidates)
        if self.ranks <= self.limits.exact_devices:
            known_s = self.limits.faster_than_s
            fastest_s = known_s if self.fastest is None else min(known_s, self.fastest[1].step_s)
            for strategy in exact(self, None if math.isinf(fastest_s) else fastest_s, self.choices):
                self.consider(strategy)
        if not self.kept.entries:
            self.candidates = candidates
            raise NothingFits(self)
        few = self.ranks <= self.limits.exact_devices
        for number, (seconds, strategy) in enumerate(self._beginnings()):
            if self.late() or number == (IMPROVED_FEW if few else IMPROVED):
                break
            self.improve(strategy, seconds, few and number < IMPROVED_WIDELY)
        if not few:
            self._with_idle()
        self._without_zero()
        assert self.fastest is not None
        strategy, evaluation = self.fastest
        others = [(s, e) for _, s, e in sorted(self.kept.entries, key=lambda e: e[0]) if s is not strategy]
        return SearchResult(
            strategy,
            evaluation,
            others,
            self.misfits,
            self.estimated,
            self.simulated,
            time.monotonic() - self.started,
            min(evaluation.step_s, self.bound_s()),
            not self.was_late,
            self.machines.cluster,
        )

    def _try(self, candidates: list[Candidate]) -> None:
        """Cuts candidates in the order of estimates until these are far behind the best, and simulates the best of
        them.

        Of each shape the best one is cut, whatever its rank; interleaved candidates, which are divided
        evenly instead of cut, are all simulated if they may be faster than the best.
        """
        effort = HURRIED if self.limits.hurried else THOROUGH
        failed = 0
        built: list[tuple[float, ParallelStrategy]] = []
        best = float("inf")
        known: set[tuple[object, ...]] = set()
        for one in candidates:
            if self.late(CUT) and built:
                break
            if one.estimate_s > min(BEHIND * best, self.limits.faster_than_s):
                break
            shape = one.shape
            if len(built) >= effort.cut and (one.estimate_s > best or (shape in known and one.chunks == 1)):
                continue
            strategy = self.build(one) if self.roomy(one) else None
            if strategy is None:
                failed += 1
                if failed <= effort.misfits:
                    self.misfit(one.even(self.model.count))
                continue
            seconds = self.quick_s(strategy)
            if seconds < float("inf"):
                built.append((seconds, strategy))
                known.add(shape)
                best = min(best, seconds)
        for number, (seconds, strategy) in enumerate(sorted(built, key=lambda e: e[0])):
            if self.kept.entries and (self.late(SIMULATED) or number >= effort.simulated or seconds > BEHIND * best):
                break
            self.consider(strategy)

    def quick_s(self, strategy: ParallelStrategy) -> float:
        """Estimates the step without a simulation: sum of the stages' passes and the slowest stage's; infinite if it
        does not fit.
        """
        count, stages = strategy.micro_batches, len(strategy.stages)
        slowest = total = after = 0.0
        ranks = strategy.ranks
        known: dict[tuple[int, int, tuple[DeviceGroup, ...], str | None, int], float] = {}
        for index, stage in enumerate(strategy.stages):
            live = self.live(strategy, index)
            edge = min(index, 1) + 2 * (index == stages - 1)
            key = (stage.count, edge, stage.parts, stage.recompute, live)
            if key not in known:
                cost = self.stage_costs(strategy, index, live, ranks)
                if cost.lacking_bytes > 0:
                    return float("inf")
                known[key] = sum(cost.forward_s) + sum(cost.backward_s)
                after = max(after, cost.reduce_s + cost.update_s)
            slowest = max(slowest, known[key])
            total += known[key]
        return count * slowest + (total - slowest) / strategy.chunks + after

    def live(self, strategy: ParallelStrategy, index: int) -> int:
        """Returns how many micro-batch chunks a stage keeps at its peak."""
        return count_live_chunks(
            strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches, index
        )

    def least_memory(self) -> Iterator[Candidate]:
        """Yields the listed candidates, and then those with the most division and recomputation, however slow they
        are.
        """
        yield from self.candidates
        limits = self.limits
        again = limits.recompute or self.model.recomputes()[-1][0]
        rows = 1 if self.model.row_choices(0, 1) is None else None
        least = replace(limits, hurried=True, recompute=again, micro_batch=limits.micro_batch or rows)
        lean = Search(self.model, self.machines, self.batch, least)
        lean.kept_per_shape = sys.maxsize
        yield from lean.pure()
        yield from lean.mixed()

    def misfit(self, strategy: ParallelStrategy) -> None:
        """Records a strategy that does not fit, with its evaluation, for the list of alternatives.

        Strategies with so many passes that their simulation would take long are left out.
        """
        if strategy.micro_batches * len(strategy.stages) < MISFIT_PASSES:
            self.consider(strategy)

    def _with_idle(self) -> None:
        """Adds stages to the best strategy, on idle devices, while that shortens its step.

        Families give the stages of a strategy equal parts; idle devices may still help with a smaller stage.
        """
        while self.fastest is not None and self.limits.stages is None:
            strategy, seconds = self.fastest[0], self.fastest[1].step_s
            if strategy.chunks > 1 or len(strategy.stages) > CUT_ANEW:
                return
            for ranks in with_idle(strategy, self.machines, self.tensors, self.allowed):
                if self.late():
                    return
                if (found := self._cut(strategy, ranks)) is not None:
                    self.consider(found)
            best = self.fastest
            if best[1].step_s >= seconds * (1 - SHORTER):
                return
            self.improve(best[0], best[1].step_s, wide=False)

    def _without_zero(self) -> None:
        """Simulates the best strategy also with replicated optimizer state, if the user leaves that free."""
        if self.limits.zero is None and self.fastest is not None:
            self.consider(msgspec.structs.replace(self.fastest[0], zero=0))
