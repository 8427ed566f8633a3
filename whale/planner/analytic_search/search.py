"""Searches for the fastest strategy on given devices: estimates many, simulates the best, then improves these step by
step.

Candidates come from families that together contain the strategies known to be good:

* pure: every stage is on one pool, and all stages have equally many replicas; a fast pool gets more stages;
* mixed: every stage has replicas on several pools, whose rows are divided by their speed (one stage: data parallelism
  over unequal devices);
* exact: for few devices, every assignment of devices to stages (see `whale.planner.analytic_search.exact`).

An estimate takes microseconds: seconds of the layers over the ranks' speed, the pipeline's bubble, the gradient
reduction. For the candidates with the best estimates, `layer_partition` assigns layers to stages ("cuts" them), and the
results are simulated. Then `moves` improve the best ones, one change after the other; so strategies are reached that no
family contains (other tensor-parallel degrees in the first and last stage, a further stage on idle devices, chunks of
unequal length).

Decisions: 0048, 0195, 0211, 0214, 0215, 0219, 0222, 0225.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate, tied_s
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stage_cache import StageCosts, count_lives
from cost_model.analytic.stage_costs import StageCost, fully_sharded
from cost_model.cluster.pools import Machines
from cost_model.simulator import least_end_s
from whale.ir.strategy import (
    DeviceGroup,
    ParallelStrategy,
    Recompute,
    Stage,
    count_expert_ranks,
    place_chunks,
)
from whale.planner.analytic_search.candidates import Candidate, Constraints
from whale.planner.analytic_search.enumerate_candidates import Families
from whale.planner.analytic_search.estimate import divisors
from whale.planner.analytic_search.exact import exact
from whale.planner.analytic_search.layer_partition import Chain, Room, balance_layers
from whale.planner.analytic_search.moves import Moves, Ranks, count_kinds, has_room, layer_moves, with_counts
from whale.planner.analytic_search.neighbours import StageRanks, neighbours, other_orders, other_ranks
from whale.planner.analytic_search.random_moves import RandomMoves
from whale.planner.analytic_search.recompute_stages import RecomputeChoice
from whale.planner.analytic_search.simplicity import Complexity, measure_complexity
from whale.planner.analytic_search.work import (
    BOUND_S,
    CHOOSE_S,
    COST_S,
    CUT_S,
    DIVIDE_S,
    EVALUATE_S,
    FIT_S,
    KEY_S,
    LOOKUP_S,
    MEAN_S,
    MEMORY_S,
    MOVE_S,
    PASS_S,
    PASSES_S,
    RANDOM_S,
    Work,
)


@dataclass(frozen=True)
class _Effort:
    """Holds how many candidates each phase of a search processes.

    Attributes:
        cut: candidates whose layers are assigned to stages.
        simulated: how many of the cut candidates are simulated, those with the smallest lower bound first.
        misfits: candidates without enough memory that are evaluated all the same, for the report's list of misfits.
    """

    cut: int
    simulated: int
    misfits: int


THOROUGH, HURRIED = _Effort(cut=40, simulated=24, misfits=8), _Effort(cut=16, simulated=6, misfits=2)
# How many strategies are improved with few devices, where a simulation costs next to nothing; for how many of them
# `improve` also tries all other ranks of a stage; and how many are improved before every assignment is looked at.
IMPROVED_FEW, IMPROVED_WIDELY, IMPROVED_BEFORE = 100, 40, 3
CUT_ANEW = 16  # most stages of a strategy for which all orders of `other_orders` are cut anew
BEHIND = 1.3  # candidates estimated at more than this times the best are skipped
MISFITS = 50  # most misfits that are recorded
MISFIT_PASSES = 5000  # misfits with more passes per step are not simulated, as that would take long
# Least gain of a change, as part of a step: of the first changes of a strategy, of later ones, and of the last ones
# (just above rounding).
LEAP, STEP, SHORTER = 1e-2, 1e-3, 1e-9
# Strategies that are improved quickly for each that is improved to the end, and the work after which one of these is
# left, if nothing was gained, as a part of what listing took.
QUICK, QUICK_PART = 2, 0.2
POLISHING_PART = 0.1  # the most work of `_polish_new_best`, as a part of all work so far
AGAIN = 5e-3  # other ranks are tried again once moves of layers have shortened the step by this part
MOST_KEPT, KEPT = 400, 200  # when more strategies than the first number are recorded, the best of them are kept
NEARLY = 1.25  # strategies bounded below this times the step are cut anew, which may make them faster
MANY = 10  # about how often a chain is cut until its best partition is found (for `Work`)
MOST_CHUNKS = 64  # most chunks of a stage
SHAKEN, PATIENCE = 3, 16  # random changes improved per round of `_shake`, and rounds without gain before it ends
WANDERED, WANDERED_SOME = 1024, 128  # random changes without gain before `_wander` ends: from the best, from others
# Random changes of ranks that lead to another place to begin from, and the times the best step that each may take.
AWAY, AWAY_TIMES = (2, 5), 1.6
AT_ONCE = 8  # interleaved strategies of which the fastest is gone on with
EXPERTS_TRIED = 8  # listed strategies that are tried with other expert-parallel degrees
AWAY_TRIED = 32  # random changes of which the first that is not too slow is taken
DIVIDED = 0.5  # of random changes of ranks, those after which layers are divided anew
ENDS_OF, ENDS = 4, 6  # strategies whose first and last stages are changed; other ranks of each of these
# Random moves of layers without gain before the best strategy is left as it is, and before another one is; strategies
# with other numbers of chunks whose layers are moved so, and the times the best step that each may take before.
POLISHED, POLISHED_FEW, INTERLEAVED, MOVED = 512, 128, 3, 1.15
WORSE = 1.5  # results of a random change are improved if their step is below this times the best
# Numbers of chunks that are tried, beside those near a strategy's own and those that divide layers evenly.
CHUNKS_LOOKED_AT = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
CHUNKS_TRIED = 4  # how many of these numbers, those with the smallest lower bounds, are simulated


@dataclass
class _Simulated:
    """Stores the simulated strategies that fit.

    Attributes:
        entries: (seconds of a step, strategy, evaluation) of the best ones.
        seen: seconds of a step of all strategies that were considered, by hash, so that none is simulated twice;
            infinite if a strategy does not fit or was known to be slow.
        simple: the fastest strategy of each complexity, which may be slower than all `entries`.
    """

    entries: list[tuple[float, ParallelStrategy, Evaluation]] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    # The fastest of each complexity, which may be slower than all entries.
    simple: dict[Complexity, tuple[float, ParallelStrategy, Evaluation]] = field(default_factory=dict)

    def keep(self, strategy: ParallelStrategy, found: Evaluation) -> None:
        self.entries.append((found.step_s, strategy, found))
        self.keep_simple(strategy, found)
        if len(self.entries) > MOST_KEPT:
            self.entries.sort(key=lambda e: e[0])
            del self.entries[KEPT:]

    def keep_simple(self, strategy: ParallelStrategy, found: Evaluation) -> None:
        complexity = measure_complexity(strategy)
        if (known := self.simple.get(complexity)) is None or found.step_s < known[0]:
            self.simple[complexity] = found.step_s, strategy, found


class NothingFits(Exception):
    """Raised if no strategy that a search tried fits into memory; `search` is that search."""

    def __init__(self, search: Search) -> None:
        super().__init__("nothing fits")
        self.search = search


class Search(Families):
    """Searches strategies of a model on a cluster for one global batch and one kind of offload.

    `begin` lists candidates and improves the best; `improve_listed`, `go_on` and `widen` spend more work on them. The
    fastest strategy so far is in `fastest`, other fast ones in `kept`.
    """

    def __init__(
        self,
        model: Model,
        machines: Machines,
        batch: int,
        limits: Constraints,
        work: Work | None = None,
        stage_costs: StageCosts | None = None,
    ) -> None:
        super().__init__(model, machines, batch, limits, work or Work(math.inf))
        self.stage_costs = stage_costs or StageCosts(model, machines)  # a cache that searches on one cluster share
        self.simulated = 0
        self.candidates: list[Candidate] = []
        self.kept = _Simulated()
        self.fastest: tuple[ParallelStrategy, Evaluation] | None = None
        self.misfits: list[tuple[ParallelStrategy, Evaluation]] = []
        self.room = Room(machines)
        self.recompute = RecomputeChoice(self.stage_costs)
        # With few devices: the options of a stage, by (micro-batches, sequence parallelism).
        self.choices: dict[tuple[int, bool], list[StageRanks]] = {}
        # Results of `_cut` with the limit in seconds, by hash of settings and ranks; the step below which all changes
        # of a strategy's ranks were tried, by hash of the strategy without its layers.
        self.cuts: dict[int, tuple[ParallelStrategy | None, float]] = {}
        self.changed: dict[int, float] = {}
        self.looked_at_all = False  # whether every assignment of few devices to stages was tried
        self.listing_s = 0.0  # seconds of work of the first list
        self.listed_s = math.inf  # step of the best candidate, before any was improved
        self.shaken = 0  # times that random changes were made
        self.refined_s = math.inf  # step of the strategy that `refine` has left
        self.moves = Moves(
            machines,
            model.count,
            self.batch,
            self.tensors,
            self.is_allowed,
            lambda pool, tensor, rows, ways: self.shared_s(pool, tensor, rows, self.recomputes()[0], ways),
            lambda pool, tensor: self.rows_of(pool, tensor)[-1],
            limits.runnable,
            self.context,
            limits.experts or 1,
        )
        self.random = RandomMoves(
            self.moves,
            list(range(4)) if limits.zero is None else [limits.zero],
            [0, *divisors(model.experts)] if model.experts and limits.experts is None else [limits.experts or 0],
            MOST_CHUNKS if limits.chunks is None else limits.chunks,
        )

    @property
    def few(self) -> bool:
        """Returns True if there are so few devices that every assignment of devices to stages is tried."""
        return self.ranks <= self.limits.exact_devices and self.replicas_step == 1

    def build(self, one: Candidate) -> ParallelStrategy | None:
        """Assigns the candidate's layers to stages; returns None if they do not fit into memory.

        A stage uses the candidate's kind of recompute or one that recomputes less.
        """
        if one.chunks > 1:
            return self.fit(self._divided(one.settings, one.ranks, one.chunks))
        kinds = self.recompute_kinds(one.settings.sequence_parallel)
        kinds = kinds[: kinds.index(one.settings.recompute) + 1]
        return self._cut(one.settings, one.ranks, kinds)

    def _cut(
        self,
        settings: ParallelStrategy,
        ranks: Sequence[tuple[DeviceGroup, ...]],
        kinds: Sequence[Recompute] | None = None,
        below_s: float = math.inf,
    ) -> ParallelStrategy | None:
        """Assigns layers to stages on the given ranks so that the slowest stage is as fast as possible; None: they do
        not fit.

        Args:
            settings: the strategy's settings; its stages, if it has any, are ignored.
            ranks: device groups of each stage, in pipeline order.
            kinds: the kinds of recompute that a stage may use; None: all allowed ones.
            below_s: None is returned also if the slowest stage takes longer than this for a micro-batch.
        """
        kinds = self.recompute_kinds(settings.sequence_parallel) if kinds is None else kinds
        settings = msgspec.structs.replace(settings, stages=())
        key = hash((settings, tuple(ranks), tuple(kinds)))
        found, without_s = self.cuts.get(key, (None, 0.0))
        if found is None and below_s > without_s:
            looked = self.room.looked
            chain = Chain(self.model, ranks, settings, self.ranks, self.room, kinds)
            ends = chain.best(below_s)
            found = None if ends is None else self.fit(chain.strategy(ends))
            self.cuts[key] = found, below_s
            self.work.spend(FIT_S * (self.room.looked - looked) + CUT_S * len(ranks) * (1 if found is None else MANY))
        return found

    def fit(self, strategy: ParallelStrategy) -> ParallelStrategy:
        """Returns the strategy with the least recomputation in every stage that its memory allows."""
        kinds, before = self.recompute_kinds(strategy.sequence_parallel), self._count_computed()
        fitted = self.recompute.fit(strategy, kinds, count_lives(strategy))
        self._spend_computed(before, CHOOSE_S * len(strategy.stages))
        return fitted

    def consider(self, strategy: ParallelStrategy, below_s: float = math.inf) -> tuple[float, ParallelStrategy]:
        """Simulates a strategy and records the result, unless a lower bound shows that its step takes at least
        `below_s`.

        Returns:
            (seconds of its step, the strategy with its recompute chosen). The seconds are infinite if the strategy does
            not fit, was considered before, violates a constraint, or is not faster.
        """
        strategy, is_new = self._prepare(strategy, below_s)
        return (self._simulate(strategy) if is_new else math.inf), strategy

    def _prepare(self, strategy: ParallelStrategy, below_s: float) -> tuple[ParallelStrategy, bool]:
        """Returns the strategy in its legal form, with recompute chosen, and whether it is worth simulating: new and
        maybe faster.
        """
        self.work.convert_if_due()
        self.work.settle_if_due()
        if self.limits.zero is None and strategy.zero and all(stage.replicas == 1 for stage in strategy.stages):
            strategy = msgspec.structs.replace(strategy, zero=0)  # with one replica there is no state to shard
        if strategy.expert_ranks != (legal := self._keep_experts(strategy, [stage.parts for stage in strategy.stages])):
            strategy = msgspec.structs.replace(strategy, expert_ranks=legal)
        if not self.keeps_choices(strategy) or self._passes_at_least_s(strategy, below_s) >= below_s:
            return strategy, False
        strategy = self.fit(strategy)
        if (key := hash(strategy)) in self.kept.seen:
            return strategy, False
        self.kept.seen[key] = math.inf
        return strategy, math.isinf(below_s) or self._fitted_at_least_s(strategy) < below_s

    def _simulate(self, strategy: ParallelStrategy) -> float:
        """Simulates a strategy and records it if it fits; returns seconds of its step, infinite if it does not fit."""
        before = self._count_computed()
        found = evaluate(self.model, self.machines, strategy, self.stage_costs)
        self.simulated += 1
        if found.fits:
            self.kept.seen[hash(strategy)] = found.step_s
            self.kept.keep(strategy, found)
            if self.fastest is None or found.step_s < self.fastest[1].step_s:
                self.fastest = strategy, found
            self.work.may_end |= math.isinf(self.work.best_s)
            self.work.best_s = min(self.work.best_s, found.step_s)
        elif len(self.misfits) < MISFITS:
            self.misfits.append((strategy, found))
        stages = len(strategy.stages)
        passes = 2 * strategy.micro_batches * stages * strategy.chunks
        self._spend_computed(before, EVALUATE_S + PASS_S * passes + LOOKUP_S * stages)
        return found.step_s if found.fits else math.inf

    def _keep_experts(self, settings: ParallelStrategy, ranks: Ranks) -> int:
        """Returns the settings' expert-parallel degree if it divides the replicas of all these stages; else 0
        (automatic).
        """
        ways = settings.expert_ranks
        return ways if ways and all(sum(p.replicas for p in parts) % ways == 0 for parts in ranks) else 0

    def at_least_s(self, strategy: ParallelStrategy, below_s: float = math.inf) -> float:
        """Returns a lower bound of the seconds of a step in which every stage recomputes as little as fits; infinite if
        it does not fit, 0 if no bound is known.

        Args:
            below_s: a bound that reaches this may be a lower one than is known, and of a strategy that does not fit:
                most strategies are slower by the passes of one stage alone, and nothing else is computed for them.
        """
        least_s = self._passes_at_least_s(strategy, below_s)
        return least_s if least_s >= below_s else self._fitted_at_least_s(self.fit(strategy))

    def _passes_at_least_s(self, strategy: ParallelStrategy, below_s: float) -> float:
        """Returns a lower bound of a step's seconds by its passes without sends and with the least recomputation, of
        one stage if that reaches `below_s`; 0 if no bound is known or `below_s` is infinite.
        """
        if math.isinf(below_s) or fully_sharded(self.model, strategy):
            return 0.0
        micro_batches, before = strategy.micro_batches, self.stage_costs.passes_computed
        how = self.recompute_kinds(strategy.sequence_parallel)[0]
        passes = self.stage_costs.list_passes(strategy, how, below_s / micro_batches)
        computed = self.stage_costs.passes_computed - before
        self.work.spend(BOUND_S + KEY_S * len(strategy.stages) + PASSES_S * computed)
        if len(passes) < len(strategy.stages):
            return micro_batches * passes[0].both_s
        return least_end_s([p.forward_s for p in passes], [p.backward_s for p in passes], micro_batches)

    def _fitted_at_least_s(self, strategy: ParallelStrategy) -> float:
        """Returns what `at_least_s` does for a strategy whose recomputation is chosen."""
        if fully_sharded(self.model, strategy):
            return 0.0
        costs = self._costs(strategy, fitting=True)
        if costs[-1].lacking_bytes > 0:
            return math.inf
        passes_s = least_end_s([c.forward_s for c in costs], [c.backward_s for c in costs], strategy.micro_batches)
        after_s = costs[0].reduce_s + max([cost.update_s for cost in costs])
        return passes_s + after_s + tied_s(self.model, self.machines, strategy)

    def _costs(self, strategy: ParallelStrategy, fitting: bool = False) -> list[StageCost]:
        """Returns the costs of all stages; `fitting`: up to the first one that does not fit into memory."""
        before = self._count_computed()
        costs = self.stage_costs.list_costs(strategy, fitting)
        self._spend_computed(before, LOOKUP_S * len(costs))
        return costs

    def _count_computed(self) -> tuple[int, int, int]:
        """Returns how many stages' passes, memory, and costs were computed so far, rather than found in the cache."""
        return self.stage_costs.passes_computed, self.stage_costs.memory_computed, self.stage_costs.computed

    def _spend_computed(self, before: tuple[int, int, int], more_s: float) -> None:
        """Counts the work of what was computed since `_count_computed` returned `before`, and `more_s`."""
        passes, memory, costs = before
        cache = self.stage_costs
        computed_s = PASSES_S * (cache.passes_computed - passes) + MEMORY_S * (cache.memory_computed - memory)
        self.work.spend(computed_s + COST_S * (cache.computed - costs) + more_s)

    def improve(
        self,
        strategy: ParallelStrategy,
        seconds: float,
        gain: float = SHORTER,
        wide: bool = False,
        patience_s: float = math.inf,
    ) -> None:
        """Replaces the strategy by a neighbour that is faster by at least a part `gain`, as long as there is one.

        The results are recorded in `kept` and `fastest`.

        Args:
            seconds: the strategy's step.
            wide: with few devices, also tries every other device group for one stage.
            patience_s: seconds of work without such a neighbour after which the strategy is left as it is.
        """
        while True:
            most_s = seconds * (1 - gain)
            others = self._within(self._others(strategy, most_s, wide), patience_s)
            for took_s, fitted in self._consider_some(others, most_s):
                if took_s < most_s:
                    strategy, seconds = self._polish_new_best(fitted, took_s)
                    break
            else:
                return

    def _consider_some(
        self, strategies: Iterator[ParallelStrategy], below_s: float
    ) -> Iterator[tuple[float, ParallelStrategy]]:
        """Considers strategies and yields the fastest result of every few interleaved ones, and each other result."""
        found: list[tuple[float, ParallelStrategy]] = []
        for one in strategies:
            took_s, fitted = self.consider(one, below_s)
            if took_s < math.inf:
                found.append((took_s, fitted))
            if len(found) >= (AT_ONCE if fitted.chunks > 1 else 1):
                yield min(found, key=lambda e: e[0])
                found = []
        if found:
            yield min(found, key=lambda e: e[0])

    def _within(self, strategies: Iterator[ParallelStrategy], most_s: float) -> Iterator[ParallelStrategy]:
        """Yields strategies until seconds of work have been spent since the first was asked for."""
        until_s = self.work.used_s + most_s
        for one in strategies:
            yield one
            if self.work.used_s > until_s:
                return

    def _others(self, strategy: ParallelStrategy, seconds: float, wide: bool) -> Iterator[ParallelStrategy]:
        """Yields the neighbours of a strategy: first those with other settings or ranks, which gain the most; then
        other layers.

        Args:
            seconds: neighbours that cannot be faster than this may be left out.
            wide: also yields every other device group for one stage (few devices only).
        """
        settings = msgspec.structs.replace(strategy, stages=())
        ranks = [stage.parts for stage in strategy.stages]
        key = hash((settings, tuple(ranks), strategy.chunks))
        known_s = self.changed.get(key, 0.0)
        if seconds > known_s or seconds < known_s * (1 - AGAIN):
            yield from self._other_settings(strategy, seconds)
            yield from self._other_ranks(strategy, seconds)
            if strategy.chunks == 1 and len(ranks) <= CUT_ANEW:
                yield from self._recut(settings, other_orders(ranks), seconds)
            self.changed[key] = seconds
        if self.few and strategy.chunks == 1:
            yield from neighbours(strategy)
            if wide:
                choices = self.choices.get((strategy.micro_batches, strategy.sequence_parallel), [])
                yield from other_ranks(strategy, self.machines, choices, self.limits.stages is None)
        yield from layer_moves(strategy, [sum(c.forward_s) + sum(c.backward_s) for c in self._costs(strategy)])

    def _other_settings(self, strategy: ParallelStrategy, seconds: float) -> Iterator[ParallelStrategy]:
        """Yields the strategy with other ZeRO levels, other expert-parallel degrees, both, and other numbers of chunks.

        Both change together, since what ZeRO divides of the experts depends on how many replicas have the same ones.
        """
        levels = range(4) if self.limits.zero is None else (strategy.zero,)
        ways: list[int] = [strategy.expert_ranks]
        if self.model.experts and self.limits.experts is None:
            ranks = [stage.parts for stage in strategy.stages]
            able = (msgspec.structs.replace(strategy, expert_ranks=n) for n in divisors(self.model.experts))
            ways += [n for one in able if (n := one.expert_ranks) != ways[0] and self._keep_experts(one, ranks)]
        for zero, own in itertools.product(levels, ways):
            if (zero, own) != (strategy.zero, strategy.expert_ranks):
                yield msgspec.structs.replace(strategy, zero=zero, expert_ranks=own)
        yield from self._chunked(strategy, [stage.parts for stage in strategy.stages], strategy.chunks, seconds)

    def _other_ranks(self, strategy: ParallelStrategy, seconds: float) -> Iterator[ParallelStrategy]:
        """Yields the strategy on other ranks, if these could be faster than `seconds`: first with its layers, then cut
        anew.
        """
        settings = msgspec.structs.replace(strategy, stages=())
        changes = [one for one in self.moves.of_ranks(strategy) if self._least_s(*one, settings) < seconds]
        self.work.spend(DIVIDE_S * len(changes))
        random.Random(len(changes)).shuffle(changes)  # similar changes come one after the other in the list
        able: list[tuple[float, ParallelStrategy, Ranks]] = []
        for micro_batches, ranks in changes:
            own = self._settings_for(settings, micro_batches, ranks)
            plain = self._with_layers_of(strategy, own, ranks)
            divided_anew = strategy.chunks == 1 or len(ranks) != len(strategy.stages)
            nearly_s = NEARLY * seconds if divided_anew else seconds
            least_s = self.at_least_s(plain, nearly_s)
            if least_s < seconds:
                yield plain
            if divided_anew and (least_s < nearly_s or math.isinf(least_s)):
                able.append((least_s, own, ranks))
        # Cuts take longest: they come last, the most promising ones first. With another number of stages, other
        # numbers of chunks may be the best, and the present one may not fit.
        for _, own, ranks in sorted(able, key=lambda e: e[0]):
            if strategy.chunks == 1:
                yield from self._recut(own, [ranks], seconds)
            else:
                yield from self._chunked(own, ranks, strategy.chunks, seconds)

    def _settings_for(self, settings: ParallelStrategy, micro_batches: int, ranks: Ranks) -> ParallelStrategy:
        """Returns the settings with another number of micro-batches, and without an expert degree that these ranks do
        not allow.
        """
        experts = self._keep_experts(settings, ranks)
        return msgspec.structs.replace(settings, micro_batches=micro_batches, expert_ranks=experts)

    def _with_layers_of(self, strategy: ParallelStrategy, settings: ParallelStrategy, ranks: Ranks) -> ParallelStrategy:
        """Returns `settings` with stages on `ranks` that have the layers of the strategy's stages.

        If the numbers of stages differ, layers are divided in proportion to the speed of the ranks instead.
        """
        if len(ranks) == len(strategy.stages):
            stages = tuple([Stage(stage.layers, parts) for stage, parts in zip(strategy.stages, ranks)])
            return msgspec.structs.replace(settings, stages=stages)
        chunks = min(strategy.chunks, self.model.count // len(ranks)) if len(ranks) > 1 else 1
        return self._divided(settings, ranks, chunks)

    def _divided(self, settings: ParallelStrategy, ranks: Ranks, chunks: int) -> ParallelStrategy:
        """Returns a strategy whose stages get as many layers as make the slowest stage as fast as possible, at least
        one in each of `chunks` chunks.
        """
        return self._with_layers(settings, ranks, chunks, self._seconds(settings, ranks))

    def _seconds(self, settings: ParallelStrategy, ranks: Ranks) -> tuple[list[float], list[float]]:
        """Returns the seconds per micro-batch of (a layer on each stage, embedding and head on each stage)."""
        each = {parts: self._layer_and_ends_s(parts, settings) for parts in dict.fromkeys(ranks)}
        more_s = [0.0] * len(ranks)
        more_s[0] += each[ranks[0]][1]
        more_s[-1] += each[ranks[-1]][2]
        return [each[parts][0] for parts in ranks], more_s

    def _layer_and_ends_s(self, parts: tuple[DeviceGroup, ...], settings: ParallelStrategy) -> tuple[float, ...]:
        """Returns the seconds per micro-batch of (a layer, the embedding, the head) on the slowest ranks of a stage,
        with the least recomputation allowed.
        """
        how, ways = (self.recomputes()[0][0], settings.sequence_parallel), self._find_ways(parts, settings)
        found = []
        for part in parts:
            costs, whole_s, _ = self.predict_whole(part.pool, part.tensor, part.rows, how, ways)
            first_s, last_s = [edge.forward.seconds + edge.backward.seconds for edge in costs.edges]
            found.append(((whole_s - first_s - last_s) / costs.count, first_s, last_s))
        return max(found)

    def _find_ways(self, parts: tuple[DeviceGroup, ...], settings: ParallelStrategy) -> int:
        """Returns the expert-parallel degree of a stage on these device groups; 0: the model has no experts."""
        if self.model.experts and not settings.expert_ranks:
            return count_expert_ranks(self.model.experts, sum(p.replicas for p in parts))
        return settings.expert_ranks

    def _with_layers(
        self, settings: ParallelStrategy, ranks: Ranks, chunks: int, seconds: tuple[list[float], list[float]]
    ) -> ParallelStrategy:
        stages, count = len(ranks), self.model.count
        each = balance_layers(count, *seconds, chunks)
        layers = place_chunks([n // chunks + (i < n % chunks) for i in range(chunks) for n in each], stages)
        return msgspec.structs.replace(settings, stages=tuple([Stage(own, parts) for own, parts in zip(layers, ranks)]))

    def _try_ends(self) -> None:
        """Simulates the best strategies with other ranks in the first stage, the last one and both.

        The embedding and the head, which no other stage has, may take as long as many layers, and the sum of their
        gradients as long as a step where links are slow: few replicas with many tensor ranks suit them better.
        """
        for seconds, strategy in self._beginnings()[:ENDS_OF]:
            ranks: Ranks = [stage.parts for stage in strategy.stages]
            if len(ranks) < 3:
                continue
            settings, last = msgspec.structs.replace(strategy, stages=()), len(ranks) - 1
            rows = strategy.stages[0].rows
            pools = dict.fromkeys(part.pool for parts in ranks for part in parts)
            groups = [
                (one,)
                for pool in pools for tensor in self.tensors(pool) for replicas in divisors(rows)
                if self.moves.allows((one := DeviceGroup(pool, tensor, replicas, rows // replicas),))
            ]  # fmt: skip
            able: dict[int, list[tuple[float, tuple[DeviceGroup, ...]]]] = {}
            for at in (0, last):
                able[at] = [(seconds, ranks[at])]
                for parts in groups:
                    changed = self._with_end(settings, {at: parts}, ranks, strategy.chunks)
                    if changed is not None:
                        able[at].append((self.at_least_s(changed, NEARLY * seconds), parts))
                able[at].sort(key=lambda e: e[0])
            found = []
            for (_, first), (_, end) in itertools.product(able[0][:ENDS], able[last][:ENDS]):
                both = self._with_end(settings, {0: first, last: end}, ranks, strategy.chunks)
                if both is not None and (least_s := self.at_least_s(both, seconds)) < seconds:
                    found.append((least_s, both))
            for _, other in sorted(found, key=lambda e: e[0])[:ENDS]:
                self.consider(other)
                if other.chunks == 1 and (cut := self._cut(other, [stage.parts for stage in other.stages])) is not None:
                    self.consider(cut)

    def _with_end(
        self, settings: ParallelStrategy, ends: dict[int, tuple[DeviceGroup, ...]], ranks: Ranks, chunks: int
    ) -> ParallelStrategy | None:
        """Returns the strategy with other ranks in some stages, and fewer stages between if these leave no room."""
        own = [ends.get(i, parts) for i, parts in enumerate(ranks)]
        while not has_room(self.machines, own):
            del own[len(own) // 2]
            if len(own) < 2:
                return None
        self.work.spend(DIVIDE_S)
        return self._divided(self._settings_for(settings, settings.micro_batches, own), own, chunks)

    def _recut(self, settings: ParallelStrategy, orders: Iterable[Ranks], seconds: float) -> Iterator[ParallelStrategy]:
        """Yields, for each order of the ranks in `orders`, a strategy with one chunk of layers in each stage, unless a
        step under it surely takes longer than `seconds`.
        """
        if self.limits.chunks not in (None, 1):
            return
        for ranks in orders:
            found = self._cut(settings, ranks, below_s=seconds / settings.micro_batches)
            if found is not None:
                yield found

    def _least_s(self, micro_batches: int, ranks: Ranks, settings: ParallelStrategy) -> float:
        """Estimates the seconds of all micro-batches' passes on these ranks, as if layers could be divided into
        fractions.

        With equal loads for all stages and no bubble, this is about the least that any assignment of layers gives;
        moves that cannot be faster are left out.
        """
        each, counts = self._each_s(ranks, settings), count_kinds(ranks)
        return micro_batches * self.model.count / sum([count / each[parts] for parts, count in counts.items()])

    def _each_s(self, ranks: Ranks, settings: ParallelStrategy) -> dict[tuple[DeviceGroup, ...], float]:
        """Returns the mean seconds of one layer per micro-batch for each distinct stage, with the least recomputation
        allowed.
        """
        how = self.recomputes()[0][0], settings.sequence_parallel
        self.work.spend(MOVE_S + MEAN_S * len(ranks))
        found = {}
        for parts in count_kinds(ranks):
            ways = self._find_ways(parts, settings)
            found[parts] = max(self.predict_whole(p.pool, p.tensor, p.rows, how, ways)[2] for p in parts)
        return found

    def _chunked(
        self, strategy: ParallelStrategy, ranks: Ranks, known: int, most_s: float
    ) -> Iterator[ParallelStrategy]:
        """Yields the strategy on these ranks with the numbers of chunks that look best, layers divided by speed.

        Args:
            known: a number of chunks that was good; numbers near it are tried.
            most_s: those that cannot be faster than this are left out.
        """
        stages, count, found = len(ranks), self.model.count, []
        if stages == 1 or self.limits.chunks == 1:
            return
        most, each_s = min(MOST_CHUNKS, count // stages), self._seconds(strategy, ranks)
        near = range(known - 2, known + 3)
        tried = {self.limits.chunks} if self.limits.chunks else {*CHUNKS_LOOKED_AT, *near, *divisors(count // stages)}
        for chunks in sorted(n for n in tried if 2 <= n <= most):
            own = self._with_layers(strategy, ranks, chunks, each_s)
            if (seconds := self.at_least_s(own, most_s)) < most_s:
                found.append((seconds, chunks, own))
        yield from (own for _, _, own in sorted(found, key=lambda e: e[:2])[:CHUNKS_TRIED])

    def simplify(self, most_s: float) -> None:
        """Evaluates the fastest strategy with 1, 2, ... chunks per stage, fewer than it has, until one is within
        `most_s`.

        The results are recorded in the list of simple strategies only, so that they cannot change the search.
        """
        assert self.fastest is not None
        strategy = self.fastest[0]
        settings, ranks = msgspec.structs.replace(strategy, stages=()), [stage.parts for stage in strategy.stages]
        for chunks in range(1, strategy.chunks):
            one = self.fit(self._divided(settings, ranks, chunks))
            if self._fitted_at_least_s(one) <= most_s:
                found = evaluate(self.model, self.machines, one, self.stage_costs)
                if found.fits:
                    self.kept.keep_simple(one, found)
                    if found.step_s <= most_s:
                        return

    def begin(self, improved: int, below_s: float = math.inf, exactly: bool = True) -> None:
        """Lists candidates, simulates the best, and improves the best `improved` of them.

        With many devices only micro-batches of a power of two of rows are listed, and numbers of stages that divide the
        layers.

        Args:
            improved: how many strategies to improve.
            below_s: nothing is improved if the best candidate's step is longer than this.
            exactly: with few devices, try every assignment of them to stages first (see `look_at_all`). If not, that is
                done only if no candidate fits.

        Raises:
            NothingFits: no strategy fits into memory.
        """
        if not self.has_room_for_states():
            raise NothingFits(self)
        self._list(hurried=not self.few)
        if not self.few:
            self._try_experts()
        if exactly or not self.kept.entries:
            self._find_exactly()
        if not self.kept.entries:
            raise NothingFits(self)
        assert self.fastest is not None
        self.listed_s = self.fastest[1].step_s
        if self.listed_s <= min(below_s, BEHIND * self.limits.faster_than_s):
            self.improve_listed(improved)

    def _try_experts(self) -> None:
        """Tries the best listed strategies with every expert-parallel degree, which may change their order."""
        if not self.model.experts or self.limits.experts is not None:
            return
        listed = sorted(self.kept.entries, key=lambda e: e[0])[:EXPERTS_TRIED]
        for strategy in [one for _, one, _ in listed]:
            for ways in divisors(self.model.experts):
                self.consider(msgspec.structs.replace(strategy, expert_ranks=ways))

    def _find_exactly(self) -> None:
        """With few devices, simulates the best assignments of all devices to stages (see
        `whale.planner.analytic_search.exact`).
        """
        # With offload, moving the state takes longer than the exact balance of stages could gain.
        if not self.few or self.looked_at_all or self.offload != "none":
            return
        self.looked_at_all = True
        known_s = self.limits.faster_than_s
        fastest_s = known_s if self.fastest is None else min(known_s, self.fastest[1].step_s)
        for strategy in exact(self, None if math.isinf(fastest_s) else fastest_s, self.choices):
            self.consider(strategy)

    def look_at_all(self) -> None:
        """With few devices, tries every assignment of them to stages, and improves the best of many more strategies."""
        if self.few and self.fastest is not None and not self.looked_at_all:
            self._find_exactly()
            self._improve_best(IMPROVED_FEW)

    def improve_listed(self, improved: int) -> None:
        """Tries other ranks in the first and last stages of the best strategies, makes random changes of the best one,
        then improves the best `improved` of all that were simulated.
        """
        assert self.fastest is not None
        if not self.few:
            self._try_ends()
        self._wander(self.fastest[0], self.fastest[1].step_s, WANDERED_SOME)
        if self.few:
            improved = IMPROVED_FEW if self.looked_at_all else min(improved, IMPROVED_BEFORE)
        self._improve_best(improved)

    def refine(self) -> None:
        """Makes random changes of the best strategy, and moves its layers at random, until neither helps; does nothing
        if that was done and the strategy is hardly faster since.
        """
        assert self.fastest is not None
        if self.fastest[1].step_s >= self.refined_s * (1 - STEP):
            return
        self._wander_from_best()
        self.polish()
        self.interleave()
        self.refined_s = self.fastest[1].step_s

    def go_on(self, improved: int) -> None:
        """Spends more work on the best strategies: small changes of the best one, then improvement of the best
        `improved`.
        """
        self.refine()
        if not self.few:
            self._improve_best(improved, closely=True)

    def widen(self, improved: int) -> None:
        """Lists all candidates without the restrictions of `begin`, improves the best, and makes random changes of
        ranks.
        """
        assert self.fastest is not None
        if not self.few:
            self.known_s = BEHIND * self.fastest[1].step_s
            self._list(hurried=False)
            self._improve_best(improved, closely=True)
            self._wander_from_best()
        self._shake()

    def _wander(self, strategy: ParallelStrategy, seconds: float, patience: int) -> tuple[ParallelStrategy, float]:
        """Changes a strategy at random, keeps each improvement, and stops after `patience` tries in a row that gained
        too little.

        Too little is less than the fraction `STEP` of the step's seconds, over all these tries together. Where many
        stages are unequal, one change gains next to nothing, but a thousand of them gain about a tenth.
        """
        tried, since_s, r = 0, seconds, random.Random(self.shaken)
        self.shaken += 1
        while tried < patience:
            tried += 1
            if (changed := self._change(r, strategy)) is None:
                continue
            took_s, fitted = self.consider(changed, seconds * (1 - SHORTER))
            if took_s < seconds:
                strategy, seconds = fitted, took_s
            if seconds < since_s * (1 - STEP):
                tried, since_s = 0, seconds
        return self._polish_new_best(strategy, seconds)

    def begin_anew(self, times: int, part: float) -> None:
        """Improves strategies several random changes away from the best one, however much slower these are at first.

        Where devices are of several kinds, the changes that lead to a faster strategy one by one end in many different
        places, often a tenth apart; what few of them reach is found only from elsewhere.

        Args:
            times: how many such strategies.
            part: none is begun once this part of all work so far was spent on them.
        """
        until_s = (1 + part) * self.work.used_s
        for _ in range(times):
            if self.work.used_s > until_s:
                return
            assert self.fastest is not None
            (strategy, found), r = self.fastest, random.Random(self.shaken)
            best_s = seconds = found.step_s
            self.shaken += 1
            for _ in range(r.randint(*AWAY)):
                changed = (self._change(r, strategy, of_ranks=True) for _ in range(AWAY_TRIED))
                considered = (self.consider(one, AWAY_TIMES * best_s) for one in changed if one)
                seconds, strategy = next((one for one in considered if one[0] < math.inf), (seconds, strategy))
            strategy, seconds = self._wander(strategy, seconds, WANDERED_SOME)
            if seconds < WORSE * best_s:
                self.improve(strategy, seconds, LEAP)
            if self.fastest[1].step_s < best_s:
                self._wander_from_best()
                self.improve(self.fastest[0], self.fastest[1].step_s, STEP)

    def _change(self, r: random.Random, strategy: ParallelStrategy, of_ranks: bool = False) -> ParallelStrategy | None:
        """Returns a strategy after random changes; None: these changed nothing, or are not allowed.

        Layers are divided anew, by the speed of the ranks, in about half of those that change ranks: stages on other
        devices take too long, or too short, for the layers of the former ones.

        Args:
            of_ranks: makes only changes of ranks, and divides layers anew after each.
        """
        ranks = [stage.parts for stage in strategy.stages]
        self.work.spend(RANDOM_S + LOOKUP_S * len(ranks))
        if (one := self.random.change(r, strategy)) is None:
            return None
        if (of_ranks or r.random() < DIVIDED) and (own := [stage.parts for stage in one.stages]) != ranks:
            self.work.spend(DIVIDE_S)
            return self._divided(one, own, one.chunks)
        return None if of_ranks else one

    def _wander_from_best(self) -> None:
        assert self.fastest is not None
        self._wander(self.fastest[0], self.fastest[1].step_s, WANDERED)

    def _list(self, hurried: bool) -> None:
        self.hurried, self.best_estimate_s = hurried, math.inf
        before_s = self.work.used_s
        self.candidates = sorted(itertools.chain(self.pure(), self.enumerate_mixed()), key=lambda c: c.estimate_s)
        self._try(self.candidates, HURRIED if hurried else THOROUGH)
        if hurried:
            self.listing_s = self.work.used_s - before_s

    def _improve_best(self, count: int, closely: bool = False) -> None:
        """Improves `count` strategies while each change gains much (`LEAP`), then the fastest one by smaller gains as
        well; in a search on all devices also before the second strategy, since the budget may end before the last one.

        More strategies are improved quickly before: most gains come early, and that nothing is left to gain takes
        longest to find.

        Args:
            closely: whenever a strategy becomes the fastest, improve it by smaller gains at once.
        """
        if not self.few:
            patience_s = QUICK_PART * self.listing_s
            for seconds, strategy in self._beginnings()[: QUICK * count]:
                self.improve(strategy, seconds, LEAP, patience_s=patience_s)
        polished, polishes = None, not closely and not self.few and math.isinf(self.limits.faster_than_s)
        for number, (seconds, strategy) in enumerate(self._beginnings()[:count]):
            wide = self.few and number < IMPROVED_WIDELY
            before = self.fastest
            self.improve(strategy, seconds, SHORTER if self.few else LEAP, wide)
            if closely and self.fastest is not None and self.fastest is not before:
                self._wander_from_best()
                self.improve(self.fastest[0], self.fastest[1].step_s, STEP)
            if polishes and number == 0:
                self.polish()
                assert self.fastest is not None
                self.improve(self.fastest[0], self.fastest[1].step_s, STEP)
                polished = self.fastest
        if polishes and self.fastest is not polished:
            self.polish()  # moves of layers gain little each, and much together, in the time that ranks take for once
        for gain in (STEP, SHORTER):
            assert self.fastest is not None
            self.improve(self.fastest[0], self.fastest[1].step_s, gain)
        if closely:
            self.polish()

    def _shake(self) -> None:
        """Makes random changes of the best strategy's ranks and improves the results, until `PATIENCE` rounds in a row
        fail.
        """
        failed = 0
        while failed < PATIENCE:
            assert self.fastest is not None
            strategy, seconds = self.fastest[0], self.fastest[1].step_s
            settings = msgspec.structs.replace(strategy, stages=())
            able = [one for one in self.moves.of_ranks(strategy) if self._least_s(*one, settings) < BEHIND * seconds]
            r = random.Random(self.shaken)
            self.shaken += 1
            for micro_batches, ranks in r.sample(able, min(len(able), SHAKEN)):
                own = self._settings_for(settings, micro_batches, ranks)
                took_s, fitted = self.consider(self._with_layers_of(strategy, own, ranks))
                if math.isinf(took_s) and strategy.chunks == 1 and (cut := self._cut(own, ranks)) is not None:
                    took_s, fitted = self.consider(cut)
                if took_s < WORSE * seconds:
                    self.improve(fitted, took_s, STEP)
            failed = failed + 1 if self.fastest[1].step_s >= seconds * (1 - SHORTER) else 0
        assert self.fastest is not None
        self.improve(self.fastest[0], self.fastest[1].step_s)
        self.polish()

    def _polish_new_best(self, strategy: ParallelStrategy, seconds: float) -> tuple[ParallelStrategy, float]:
        """Polishes a strategy that has just become the best of all searches, unless that has taken much of the work so
        far; returns what came of it.

        A budget may end right after, and layers that are not yet where they should be cost some percent of a step; so
        it does not end meanwhile.
        """
        if self.few or seconds > self.work.best_s or self.work.polishing_s > POLISHING_PART * self.work.used_s:
            return strategy, seconds
        before_s = self.work.used_s
        self.work.may_end = False
        self._polish(strategy, seconds, POLISHED_FEW)
        self.work.may_end = True
        self.work.polishing_s += self.work.used_s - before_s
        assert self.fastest is not None
        return self.fastest[0], self.fastest[1].step_s

    def settle(self, until_s: float) -> None:
        """Makes small changes of the best strategy until they no longer help, or until so many seconds of work were
        spent.
        """
        assert self.fastest is not None
        while self.work.used_s < until_s and self.fastest[1].step_s < self.refined_s * (1 - STEP):
            self.refine()
            self.improve(self.fastest[0], self.fastest[1].step_s, STEP, patience_s=until_s - self.work.used_s)

    def polish(self) -> None:
        """Moves layers of the best strategy at random until that does not help."""
        assert self.fastest is not None
        self._polish(self.fastest[0], self.fastest[1].step_s, POLISHED)

    def _polish(self, strategy: ParallelStrategy, seconds: float, patience: int) -> None:
        """Moves layers of a strategy at random, one to four at once, and stops after `patience` moves in a row that
        gained too little: less than the fraction `STEP` of the step's seconds, over all these moves together.

        Where stages are unequal or interleaved, moves of single layers end in local minima. Half of the moves are
        between chunks of one stage, which change when its passes are ready, but not how long they take.
        """
        tried, since_s, r = 0, seconds, random.Random(self.shaken)
        while tried < patience:
            counts = [high - low for _, low, high in strategy.ordered_layers]
            if len(counts) < 3:
                break
            tried += 1
            if (moved := self._move_layers(strategy, counts, r)) is None:
                continue
            took_s, other = self.consider(moved, seconds * (1 - SHORTER))
            if took_s < seconds:
                strategy, seconds = other, took_s
            if seconds < since_s * (1 - STEP):
                tried, since_s = 0, seconds

    def interleave(self) -> None:
        """Tries the best strategy's stages in other numbers of chunks, whose layers are moved before they are compared:
        those of the best strategy were, and moves gain a tenth of an interleaved step.
        """
        assert self.fastest is not None
        strategy, found = self.fastest
        ranks, most_s = [stage.parts for stage in strategy.stages], MOVED * found.step_s
        others = []
        for one in self._chunked(strategy, ranks, strategy.chunks, most_s):
            _, fitted = self.consider(one)
            others.append((self.kept.seen.get(hash(fitted), math.inf), fitted))
        for took_s, one in sorted(others, key=lambda e: e[0])[:INTERLEAVED]:
            if took_s < most_s:
                self._polish(one, took_s, POLISHED_FEW)

    def _move_layers(self, strategy: ParallelStrategy, counts: list[int], r: random.Random) -> ParallelStrategy | None:
        """Returns the strategy with one to four layers moved between random ranges; None: a range would be empty.

        Args:
            counts: layers of each range, in model order.
        """
        counts, stages = list(counts), len(strategy.stages)
        for _ in range(r.choice((1, 2, 2, 3, 4))):
            giver, taker = r.sample(range(len(counts)), 2)
            if strategy.chunks > 1 and r.random() < 0.5:
                giver, taker = r.sample(range(giver % stages, len(counts), stages), 2)
            counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
        return with_counts(strategy, counts) if min(counts) > 0 else None

    def _beginnings(self) -> list[tuple[float, ParallelStrategy]]:
        """Returns (seconds, strategy) of the simulated strategies, in the order in which to improve them.

        The first are the fastest of each kind (a kind is the number of stages, the number of micro-batches, the pools
        used, and whether it is interleaved); interleaved and plain kinds alternate. All other strategies follow,
        fastest first.
        """
        first: dict[tuple[object, ...], tuple[float, ParallelStrategy]] = {}
        others = []
        for seconds, strategy, _ in sorted(self.kept.entries, key=lambda e: e[0]):
            pools = frozenset(part.pool for stage in strategy.stages for part in stage.parts)
            key = (len(strategy.stages), strategy.micro_batches, pools, strategy.chunks > 1)
            if key in first:
                others.append((seconds, strategy))
            else:
                first[key] = (seconds, strategy)
        plain = [one for one in first.values() if one[1].chunks == 1]
        interleaved = [one for one in first.values() if one[1].chunks > 1]
        both = itertools.chain(*itertools.zip_longest(interleaved, plain))
        return [*(one for one in both if one is not None), *others]

    def _try(self, candidates: Sequence[Candidate], effort: _Effort) -> None:
        """Cuts candidates into stages, best estimate first, and simulates the best results.

        Cutting ends when estimates are far behind the best lower bound so far. Once `effort.cut` candidates are cut,
        another one is cut only if its estimate is below that bound and it is interleaved, or the first of its shape
        (`Candidate.shape`). Interleaved candidates get even layers instead of a cut.
        """
        failed = 0
        built: list[tuple[float, ParallelStrategy]] = []
        best = math.inf
        known: set[tuple[object, ...]] = set()
        for one in candidates:
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
            seconds = self._fitted_at_least_s(strategy)
            if seconds < math.inf:
                built.append((seconds, strategy))
                known.add(shape)
                best = min(best, seconds)
        for number, (seconds, strategy) in enumerate(sorted(built, key=lambda e: e[0])):
            if self.kept.entries and (number >= effort.simulated or seconds > BEHIND * best):
                break
            self.consider(strategy)

    def least_memory(self) -> Iterator[Candidate]:
        """Yields the listed candidates, then candidates that need the least memory, however slow; used to explain what
        is lacking.
        """
        yield from self.candidates
        limits = self.limits
        again = limits.recompute or self.model.recomputes()[-1][0]
        rows = 1 if self.model.row_choices(0, 1) is None else None
        least = replace(limits, recompute=again, micro_batch=limits.micro_batch or rows)
        lean = Search(self.model, self.machines, self.batch // self.context, least)
        lean.kept_per_shape, lean.hurried, lean.prunes = sys.maxsize, True, False
        yield from lean.pure()
        yield from lean.enumerate_mixed()

    def misfit(self, strategy: ParallelStrategy) -> None:
        """Records a strategy that does not fit, with its evaluation, for the report's list of misfits.

        A strategy with so many passes that its simulation would take long is left out.
        """
        if strategy.micro_batches * len(strategy.stages) < MISFIT_PASSES:
            self.consider(strategy)
