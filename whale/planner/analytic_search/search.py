"""Searches for the fastest strategy: estimates order many, the best are cut into stages, the best of those simulated.

Families of strategies, which together hold what is known to be good:

* pure: every stage lies on one pool, all stages have equally many replicas; pools give stages in proportion to speed;
* mixed: every stage has replicas of several pools, whose rows are divided by their speed (one stage: data parallelism
  over unequal devices);
* exact: for few devices, every assignment of devices to stages (see `whale.planner.analytic_search.exact`).

Within a family an estimate costs microseconds: the layers' seconds over the ranks' speed, the pipeline's bubble, the
reduction. Repeated layers are looked at once. What the estimate favours is cut by `layer_partition`, then simulated.
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
    """The number of strategies that each step of a search takes on.

    Attributes:
        cut: candidates whose layers are cut.
        simulated: of those, the best by their passes.
        misfits: candidates without room that are evaluated, for the list of what lost.
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
    """The strategies simulated: (seconds, strategy, evaluation) of those that fit, and all that were looked at."""

    entries: list[tuple[float, ParallelStrategy, Evaluation]] = field(default_factory=list)
    seen: set[ParallelStrategy] = field(default_factory=set)


class NothingFits(Exception):
    """Raised when none of the strategies that a search looked at fits."""

    def __init__(self, search: Search) -> None:
        super().__init__("nothing fits")
        self.search = search


class Search(Families):
    """One search for a model on a cluster with a fixed global batch."""

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
        """Cuts the candidate's layers into stages; None where it does not fit into memory.

        A stage computes again what the candidate does, or less.
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
        """Cuts layers into stages on these ranks, in order, as fast as possible; None where they have no room.

        Args:
            settings: of the strategy; its stages, if it has any, count for nothing.
            kinds: what a stage may compute again; None: all that it may.
        """
        kinds = self.recompute_kinds(settings.sequence_parallel) if kinds is None else kinds
        chain = Chain(self.model, self.machines, ranks, settings, self.ranks, kinds)
        ends = chain.best()
        return None if ends is None else chain.strategy(ends)

    def fitted(self, strategy: ParallelStrategy) -> ParallelStrategy:
        """Returns the strategy with every stage computing again as little as its memory lets it."""
        kinds = self.recompute_kinds(strategy.sequence_parallel)
        return self.recompute.fitted(strategy, kinds, lambda index: self.live(strategy, index))

    def consider(self, strategy: ParallelStrategy) -> float:
        """Simulates a strategy and keeps it; returns its step's seconds, infinite where it does not fit or is known."""
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
        """Goes to the best neighbour while the simulated step gets shorter; `wide`: with other ranks for one stage."""
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
        """Yields the strategy's stages in other orders of their ranks, cut anew.

        Families put the devices with the most memory first, which hold the most activations. Where all have room, what
        the first and the last layer have besides may be cheaper elsewhere.
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
        """Returns the strategies to improve: the best of each number of stages and micro-batches, then the others."""
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
        """Searches until the budget is used or nothing is left.

        Raises:
            NothingFits: nothing does.
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
        """Cuts in the order of the estimate, until estimates are far behind the best; simulates the best of those.

        Of each shape the best one is cut, wherever it stands; of interleaved stages, which are not cut but divided
        evenly, all that may be faster than the best.
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
        """Estimates the step without a simulation: the slowest stage's passes, and all once; infinite: no room."""
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
        """Returns how many chunks of micro-batches a stage holds at its peak."""
        return count_live_chunks(
            strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches, index
        )

    def least_memory(self) -> Iterator[Candidate]:
        """Yields what was listed, and then what is divided most and computes most again, however slow it is."""
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
        """Keeps a strategy that does not fit, with what it would take, for the list of what lost; small ones only."""
        if strategy.micro_batches * len(strategy.stages) < MISFIT_PASSES:
            self.consider(strategy)

    def _with_idle(self) -> None:
        """Adds stages to the best strategy, on devices that it leaves idle, while that makes its step shorter.

        Families give the stages of a strategy equal parts; what leaves devices idle may gain by a lesser stage on some.
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
        """Simulates the best strategy with the optimizer's state on every rank too, where the user leaves that free."""
        if self.limits.zero is None and self.fastest is not None:
            self.consider(msgspec.structs.replace(self.fastest[0], zero=0))
