"""The search: many spreads are ordered by an estimate, the best are cut into stages, the best of those are simulated.

Families of spreads, which together hold what is known to be good:

* pure: every stage lies on one pool, all stages have equally many replicas; pools give stages in proportion to speed;
* mixed: every stage has replicas of several pools, whose rows are divided by their speed (one stage: data parallelism
  over unequal devices);
* exact: for few devices, every assignment of devices to stages (see `whale.planner.exact`).

Within a family an estimate costs microseconds: the layers' seconds over the ranks' speed, the pipeline's bubble, the
reduction. Repeated layers are looked at once. What the estimate favours is cut by `whale.planner.cut`, then simulated.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cost_model.memory import BASE_BYTES
from cost_model.predict import chunk_layers
from cost_model.simulate import Tasks, Timeline
from whale.errors import PlanError

from .cut import Chain
from .evaluate import Evaluation, evaluate, reduction_s, stage_cost
from .model import Layers, Model
from .pools import Machines
from .shares import shares
from .spread import Part, Spread, Stage


@dataclass(frozen=True)
class Limits:
    """What the user has fixed; None: free.

    `budget_s`: seconds of computing for the search; the best spread so far is returned.
    """

    stages: int | None = None
    tensor: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    recompute: str | None = None
    zero: int | None = None
    chunks: int | None = None
    budget_s: float = 10.0
    exact_units: int = 8


@dataclass(slots=True)
class Candidate:
    """A spread before its layers are cut: estimated seconds, the ranks of its stages, its settings."""

    estimate_s: float
    kinds: tuple[tuple[tuple[Part, ...], int], ...]  # (parts, so many stages), in order
    settings: Spread
    chunks: int = 1

    @property
    def stages(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def key(self) -> tuple[int, int, int]:
        """What alternatives are told apart by: stages, largest tensor degree, replicas."""
        parts = self.kinds[0][0]
        return self.stages, max(p.tensor for p in parts), sum(p.replicas for p in parts)


@dataclass
class Found:
    """What the search found: the best spread, others with what they cost, and how it went."""

    spread: Spread
    evaluation: Evaluation
    others: list[tuple[Spread, Evaluation]]
    misfits: list[tuple[Spread, Evaluation]]
    estimated: int
    simulated: int
    seconds: float
    bound_s: float
    exhausted: bool


KEPT = 40  # candidates of a shape


@dataclass
class _Best:
    entries: list[tuple[float, Spread, Evaluation]] = field(default_factory=list)
    seen: set[Spread] = field(default_factory=set)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def stage_counts(layers: int, most: int) -> list[int]:
    """Numbers of stages worth trying: for every number of layers per stage the fewest stages, and the most."""
    most = min(most, layers)
    return sorted({-(-layers // n) for n in range(1, layers + 1) if -(-layers // n) <= most} | {most})


class Search:
    """One search for a model on a cluster with a fixed global batch."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Limits) -> None:
        self.model, self.machines, self.batch, self.limits = model, machines, batch, limits
        self.started = time.process_time()
        self.ranks = machines.devices
        self.simulated = 0
        self.kept = _Best()
        self.misfits: list[tuple[Spread, Evaluation]] = []
        self.zero = 1 if limits.zero is None else limits.zero
        # In a hurry only powers of two of rows, and numbers of stages that divide the layers, are estimated.
        self.coarse = limits.budget_s < 2.0
        self.stage_counts: dict[int, list[int]] = {}
        self.shapes: dict[tuple[str, int, int], list[float]] = {}
        self.estimated = 0
        # With few devices, what a stage may lie on: (devices of each pool, parts), by micro-batches and recompute.
        self.choices: dict[tuple[int, str, bool], list[tuple[tuple[int, ...], tuple[Part, ...]]]] = {}
        self.each: dict[tuple[int, int, int, str, bool], tuple[Layers, float, float]] = {}

    def late(self, part: float = 1.0) -> bool:
        return time.process_time() - self.started > part * self.limits.budget_s

    # -- costs ------------------------------------------------------------------------------------------------------

    def whole(self, pool: int, tensor: int, rows: int, how: tuple[str, bool]) -> tuple[Layers, float, float]:
        """(costs, seconds of all layers' passes, seconds of one layer in the middle)."""
        key = (pool, tensor, rows, *how)
        if key not in self.each:
            one = self.model.layers(pool, tensor, rows, *how, self.ranks)
            count = self.model.count
            total = one.forward(0, count) + one.backward(0, count)
            self.each[key] = one, total, total / count
        return self.each[key]

    def rows_of(self, pool: int, tensor: int) -> list[int]:
        known = self.model.row_choices(pool, tensor)
        return known if known is not None else list(range(1, min(self.batch, 128) + 1))

    def recomputes(self) -> list[tuple[str, bool]]:
        found = self.model.recomputes()
        wanted = self.limits.recompute
        return [one for one in found if wanted is None or one[0] == wanted]

    def tensors(self, pool: int) -> list[int]:
        found = self.model.tensor_degrees(pool)
        return [d for d in found if self.limits.tensor in (None, d)]

    def settings(self, micro_batches: int, how: tuple[str, bool]) -> Spread:
        recompute, sequence_parallel = how
        return Spread((), micro_batches, recompute, sequence_parallel, self.zero)  # type: ignore[arg-type]

    def after_s(self, parts: tuple[Part, ...], how: tuple[str, bool], stages: int) -> float:
        """Seconds of the reduction and the update of one of so many equal stages."""
        costs = [self.whole(p.pool, p.tensor, p.rows, how)[0] for p in parts]
        own = [(one.parameters[-1] - one.twice) / stages for one in costs]
        reduce_s = reduction_s(self.model, self.machines, parts, own, self.zero)
        replicas = sum(p.replicas for p in parts) if self.zero >= 1 else 1
        update_s = 0.0
        for part, one, parameters in zip(parts, costs, own):
            if one.update_s is not None:
                update_s = max(update_s, one.update_s[-1] / stages)
                continue
            device = self.machines.pools[part.pool].device
            rate = device.memory_bytes_per_s * self.machines.pools[part.pool].entry.share
            update_s = max(update_s, self.model.stack.optimizer_bytes * parameters / replicas / rate)
        return reduce_s + update_s

    def counts(self, most: int) -> list[int]:
        """Numbers of stages to try, at most so many."""
        key = min(most, self.model.count)
        if key not in self.stage_counts:
            found = stage_counts(self.model.count, key)
            if self.coarse:
                found = [n for n in found if self.model.count % n == 0 or n == key]
            self.stage_counts[key] = found
        return self.stage_counts[key]

    def keeps(self, estimate_s: float, shape: tuple[str, int, int]) -> bool:
        """Whether a candidate is among the best of its shape so far (recompute, size of the pipeline, tensors)."""
        self.estimated += 1
        best = self.shapes.setdefault(shape, [])
        if len(best) < KEPT:
            heapq.heappush(best, -estimate_s)
            return True
        if -best[0] <= estimate_s:
            return False
        heapq.heapreplace(best, -estimate_s)
        return True

    # -- candidates -------------------------------------------------------------------------------------------------

    def pure(self) -> Iterator[Candidate]:
        """Stages on one pool each, all with the same number of replicas and rows."""
        pools, limits = self.machines.pools, self.limits
        sets = [s for n in range(1, len(pools) + 1) for s in itertools.combinations(range(len(pools)), n)]
        if len(sets) > 31:  # of many pools: each alone, and all
            sets = [s for s in sets if len(s) in (1, len(pools))]
        for chosen in reversed(sets):  # all pools first
            degrees = [self.tensors(k) for k in chosen]
            if not all(degrees):
                continue
            for tensors in self._combinations(degrees):
                rows_known = [set(self.rows_of(k, t)) for k, t in zip(chosen, tensors)]
                units = [pools[k].units(t) for k, t in zip(chosen, tensors)]
                for rows in sorted(set.intersection(*rows_known)):
                    if self.batch % rows or limits.micro_batch not in (None, rows):
                        continue
                    if self.coarse and rows & (rows - 1):
                        continue
                    yield from self._pure_of(chosen, tensors, units, rows)

    def _combinations(self, degrees: list[list[int]]) -> list[tuple[int, ...]]:
        if len(degrees) <= 2:
            return list(itertools.product(*degrees))
        alike = [(d,) * len(degrees) for d in sorted(set.intersection(*map(set, degrees)))]
        # Otherwise neighbours: degrees that differ by at most a factor of two or four.
        near = [c for c in itertools.product(*degrees) if max(c) <= 4 * min(c)] if len(degrees) <= 3 else []
        return list(dict.fromkeys(alike + near))

    def _pure_of(
        self, chosen: Sequence[int], tensors: tuple[int, ...], units: list[int], rows: int
    ) -> Iterator[Candidate]:
        limits, count = self.limits, self.model.count
        for how in self.recomputes():
            per_layer = [self.whole(k, t, rows, how)[2] for k, t in zip(chosen, tensors)]
            order = sorted(range(len(chosen)), key=lambda i: per_layer[i])
            for data in divisors(self.batch // rows):
                if data > max(units) or limits.data not in (None, data):
                    continue
                micro_batches = self.batch // rows // data
                if limits.micro_batches not in (None, micro_batches):
                    continue
                most = [u // data for u in units]
                if len(chosen) > 1 and min(most) == 0:
                    continue
                settings = self.settings(micro_batches, how)
                after_s: dict[int, float] = {}
                for stages in self.counts(sum(most)):
                    if limits.stages not in (None, stages) or (len(chosen) > 1 and stages <= sum(most) - min(most)):
                        continue
                    left, own = stages, [0] * len(chosen)
                    for i in order:
                        own[i] = min(left, most[i])
                        left -= own[i]
                    if 0 in own:
                        continue
                    speed = sum(n / c for n, c in zip(own, per_layer))
                    slowest = max(count / speed, min(per_layer) if stages > 1 else 0.0)
                    if len(chosen) == 1:
                        slowest = max(slowest, per_layer[0] * -(-(count + 0.0) // stages))
                    if stages not in after_s:
                        part = Part(chosen[0], tensors[0], data, rows)
                        after_s[stages] = self.after_s((part,), how, stages)
                    for chunks in self._chunks(stages, micro_batches, len(chosen)):
                        wait_s = (stages - 1) * slowest / chunks
                        estimate_s = micro_batches * slowest + wait_s + after_s[stages]
                        if self.keeps(estimate_s, (how[0], stages.bit_length(), max(tensors))):
                            kinds = tuple(
                                ((Part(chosen[i], tensors[i], data, rows),), own[i]) for i in self._by_memory(chosen)
                            )
                            yield Candidate(estimate_s, kinds, settings, chunks)

    def _by_memory(self, chosen: Sequence[int]) -> list[int]:
        """First stages hold the most activations: the devices with the most memory come first."""
        return sorted(range(len(chosen)), key=lambda i: -self.machines.pools[chosen[i]].memory_bytes)

    def _chunks(self, stages: int, micro_batches: int, pools: int) -> list[int]:
        limits, count = self.limits, self.model.count
        if limits.chunks is not None:
            return [limits.chunks]
        if stages == 1 or pools > 1 or micro_batches % stages:
            return [1]
        return [v for v in (1, 2, 4, 8) if count % (stages * v) == 0]

    def mixed(self) -> Iterator[Candidate]:
        """Stages that are all alike, each with replicas of all pools, rows by speed."""
        pools, limits = self.machines.pools, self.limits
        sets = [tuple(range(len(pools)))]
        if 2 < len(pools) <= 5:
            sets = [s for n in range(2, len(pools) + 1) for s in itertools.combinations(range(len(pools)), n)]
        for chosen in sets:
            degrees = [self.tensors(k) for k in chosen]
            if not all(degrees):
                continue
            for tensors in self._combinations(degrees):
                units = [pools[k].units(t) for k, t in zip(chosen, tensors)]
                if min(units) == 0:
                    continue
                for stages in self.counts(min(units)):
                    if limits.stages not in (None, stages):
                        continue
                    kinds = tuple((k, t, u // stages) for k, t, u in zip(chosen, tensors, units))
                    yield from self._mixed_of(kinds, stages)

    def _mixed_of(self, kinds: tuple[tuple[int, int, int], ...], stages: int) -> Iterator[Candidate]:
        limits, replicas = self.limits, sum(k[2] for k in kinds)
        if limits.data not in (None, replicas):
            return
        most = [self.rows_of(pool, tensor)[-1] for pool, tensor, _ in kinds]
        least = max(self.rows_of(pool, tensor)[0] for pool, tensor, _ in kinds)
        for micro_batches in divisors(self.batch):
            rows = self.batch // micro_batches
            if limits.micro_batches not in (None, micro_batches) or rows > sum(k[2] * m for k, m in zip(kinds, most)):
                continue
            if micro_batches < stages and micro_batches * 4 < stages:
                continue
            if rows < replicas and (micro_batches > 1 or stages > 1):
                continue
            for how in self.recomputes():

                def whole_s(pool: int, tensor: int, n: int, how: tuple[str, bool] = how) -> float:
                    return self.whole(pool, tensor, n, how)[1]

                parts = shares(kinds, rows, whole_s, most)
                if parts is None or any(p.rows < least for p in parts):
                    continue
                if limits.micro_batch is not None and any(p.rows != limits.micro_batch for p in parts):
                    continue
                slowest = max(self.whole(p.pool, p.tensor, p.rows, how)[1] for p in parts) / stages
                after_s = self.after_s(parts, how, stages)
                estimate_s = (micro_batches + stages - 1) * slowest + after_s
                if not self.keeps(estimate_s, (how[0], stages.bit_length(), max(k[1] for k in kinds))):
                    continue
                yield Candidate(estimate_s, ((parts, stages),), self.settings(micro_batches, how))

    def roomy(self, one: Candidate) -> bool:
        """Whether the stages' memory could hold all layers, if layers could be divided at will."""
        s, stages = one.settings, one.stages
        room, at = 0.0, 0
        how = (s.recompute, s.sequence_parallel)
        for parts, count in one.kinds:
            replicas = sum(p.replicas for p in parts) if s.zero >= 1 else 1
            worst: list[tuple[float, float, float]] = []
            for p in parts:
                layers = self.whole(p.pool, p.tensor, p.rows, how)[0]
                state = (layers.parameters[-1] - layers.twice) / self.model.count * (4.0 + 12.0 / replicas)
                free = self.machines.pools[p.pool].memory_bytes - BASE_BYTES
                worst.append((free, state, layers.held_bytes[-1] / self.model.count))
            for index in range(at, at + count):
                live = min(s.micro_batches, stages - index)
                room += min(free / max(1.0, state + live * held) for free, state, held in worst)
            at += count
        return room >= self.model.count

    # -- from candidates to spreads ---------------------------------------------------------------------------------

    def build(self, one: Candidate) -> Spread | None:
        """The candidate's layers cut; None where it does not fit into memory."""
        kinds = [parts for parts, count in one.kinds for _ in range(count)]
        if one.chunks > 1:
            return self.interleaved(kinds, one)
        chain = Chain(self.model, self.machines, kinds, one.settings, self.ranks)
        ends = chain.best()
        return None if ends is None else chain.spread(ends)

    def interleaved(self, kinds: list[tuple[Part, ...]], one: Candidate) -> Spread:
        lengths = chunk_layers(self.model.count, len(kinds), one.chunks)
        ends = list(itertools.accumulate(lengths))
        cuts = [0, *ends]
        stages = tuple(
            Stage(tuple((cuts[c * len(kinds) + s], cuts[c * len(kinds) + s + 1]) for c in range(one.chunks)), kind)
            for s, kind in enumerate(kinds)
        )
        s = one.settings
        return Spread(stages, s.micro_batches, s.recompute, s.sequence_parallel, s.zero)

    def even(self, one: Candidate) -> Spread:
        """The candidate with equally many layers per stage, whether it fits or not."""
        kinds = [parts for parts, count in one.kinds for _ in range(count)]
        return self.interleaved(kinds, one)

    def consider(self, spread: Spread) -> float:
        """Simulates a spread and keeps it; its step's seconds, infinite where it does not fit."""
        if self.limits.zero is None and spread.zero and all(stage.replicas == 1 for stage in spread.stages):
            spread = msgspec.structs.replace(spread, zero=0)  # there is nobody to share the state with
        if spread in self.kept.seen:
            return float("inf")
        self.kept.seen.add(spread)
        found = evaluate(self.model, self.machines, spread)
        self.simulated += 1
        if not found.fits:
            if len(self.misfits) < 50:
                slim = replace(found, tasks=Tasks(), timeline=Timeline([], [], found.timeline.total_s, {}))
                self.misfits.append((spread, slim))
            return float("inf")
        # Without its thousands of passes; the best spread's are computed again at the end.
        found = replace(found, tasks=Tasks(), timeline=Timeline([], [], found.timeline.total_s, {}))
        self.kept.entries.append((found.step_s, spread, found))
        return found.step_s

    @property
    def best(self) -> tuple[float, Spread, Evaluation]:
        return min(self.kept.entries, key=lambda e: e[0])

    def improve(self, spread: Spread, seconds: float, wide: bool) -> None:
        """Goes to the best neighbour while the simulated step gets shorter; `wide`: with other ranks for one stage."""
        if spread.chunks > 1:
            return
        few = self.ranks <= self.limits.exact_units
        while True:
            best = spread, seconds
            others = neighbours(spread, few)
            for other in itertools.chain(others, self._other_ranks(spread)) if wide else others:
                if self.late():
                    break
                if other not in self.kept.seen and (took := self.consider(other)) < best[1] * (1 - 1e-9):
                    best = other, took
            if best[0] is spread:
                return
            spread, seconds = best

    def _beginnings(self) -> list[tuple[float, Spread]]:
        """Spreads to improve: the best of each number of stages and micro-batches, then the others."""
        first: dict[tuple[int, int], tuple[float, Spread]] = {}
        others = []
        for seconds, spread, _ in sorted(self.kept.entries, key=lambda e: e[0]):
            key = (len(spread.stages), spread.micro_batches)
            if key in first:
                others.append((seconds, spread))
            else:
                first[key] = (seconds, spread)
        if self.ranks > self.limits.exact_units:
            return sorted([*first.values(), *others], key=lambda e: e[0])
        return [*first.values(), *others]

    def _other_ranks(self, spread: Spread) -> Iterator[Spread]:
        """The spread with other ranks for one stage, of those it has and those that no stage has."""
        choices = self.choices.get((spread.micro_batches, spread.recompute, spread.sequence_parallel), [])
        free = [pool.devices for pool in self.machines.pools]
        for part in (p for stage in spread.stages for p in stage.parts):
            free[part.pool] -= part.ranks
        by_use: dict[tuple[int, ...], list[tuple[Part, ...]]] = {}
        for used, parts in choices:
            by_use.setdefault(used, []).append(parts)
        for at, stage in enumerate(spread.stages):
            own, held = list(free), [0] * len(free)
            for part in stage.parts:
                own[part.pool] += part.ranks
                held[part.pool] += part.ranks
            if self.limits.stages is None:
                for used, parts in choices:  # two stages on the devices of this one
                    rest = tuple(n - u for n, u in zip(held, used))
                    for others in by_use.get(rest, ()):
                        ranks_given = msgspec.structs.replace(spread, stages=tuple(
                            Stage(s.layers, parts) if i == at else s for i, s in enumerate(spread.stages)
                        ))  # fmt: skip
                        yield from _with_another(ranks_given, at, others)
            for used, parts in choices:
                if parts != stage.parts and all(u <= n for u, n in zip(used, own)):
                    stages = list(spread.stages)
                    stages[at] = Stage(stage.layers, parts)
                    yield msgspec.structs.replace(spread, stages=tuple(stages))
                if all(u <= n for u, n in zip(used, free)) and self.limits.stages is None:
                    yield from _with_another(spread, at, parts)

    def bound_s(self) -> float:
        """No spread of these families is faster: all devices at their best rate, all of the time, nothing sent."""
        speed = 0.0
        for pool in self.machines.pools:
            rates = [0.0]
            for (k, tensor, rows, *_), (_, total, _) in self.each.items():
                if k == pool.number:
                    rates.append(rows / total / tensor)
            speed += pool.devices * max(rates)
        return self.batch / speed if speed else 0.0

    def run(self) -> Found:
        """Searches until the budget is used or nothing is left.

        Raises:
            PlanError: nothing fits.
        """
        candidates: list[Candidate] = []
        for family in (self.pure, self.mixed):
            for one in family():
                candidates.append(one)
                if len(candidates) % 64 == 0 and self.late(0.6):
                    break
        candidates.sort(key=lambda c: c.estimate_s)
        exhausted = self._try(candidates)
        if self.ranks <= self.limits.exact_units:
            from .exact import exact

            for spread in exact(self):
                self.consider(spread)
        if not self.kept.entries:
            from .relax import nothing_fits

            raise nothing_fits(self, candidates)
        # With few devices a simulation costs next to nothing: many beginnings are improved.
        few = self.ranks <= self.limits.exact_units
        for number, (seconds, spread) in enumerate(self._beginnings()):
            if self.late() or number == (100 if few else 4):
                break
            self.improve(spread, seconds, few and number < 40)
        self._without_zero()
        seconds, spread, _ = self.best
        evaluation = evaluate(self.model, self.machines, spread)
        others = [(s, e) for _, s, e in sorted(self.kept.entries, key=lambda e: e[0]) if s is not spread]
        return Found(
            spread,
            evaluation,
            others,
            self.misfits,
            self.estimated,
            self.simulated,
            time.process_time() - self.started,
            min(seconds, self.bound_s()),
            exhausted,
        )

    def _try(self, candidates: list[Candidate]) -> bool:
        """Cuts in the order of the estimate, until estimates are far behind the best; simulates the best of those."""
        wanted, failed, finished = 8 if self.coarse else 40, 0, True
        built: list[tuple[float, Spread]] = []
        best = float("inf")
        for one in candidates:
            if self.late(0.75) and built:
                finished = False
                break
            if one.estimate_s > 1.3 * best or len(built) >= wanted:
                break
            spread = self.build(one) if self.roomy(one) else None
            if spread is None:
                failed += 1
                if failed <= 8 and not self.coarse:
                    self.misfit(self.even(one))
                continue
            seconds = self.quick_s(spread)
            if seconds < float("inf"):
                built.append((seconds, spread))
                best = min(best, seconds)
        for number, (seconds, spread) in enumerate(sorted(built, key=lambda e: e[0])):
            if self.kept.entries and (self.late(0.85) or number >= (2 if self.coarse else 24) or seconds > 1.3 * best):
                break
            self.consider(spread)
        return finished

    def quick_s(self, spread: Spread) -> float:
        """The step without its simulation: the slowest stage's passes, and once those of all; infinite: no room."""
        count, stages = spread.micro_batches, len(spread.stages)
        slowest = total = after = 0.0
        known: dict[tuple[int, int, tuple[Part, ...], int], float] = {}
        for index, stage in enumerate(spread.stages):
            live = min(count, stages - index) if spread.chunks == 1 else self._live(spread, index)
            edge = min(index, 1) + 2 * (index == stages - 1)
            key = (stage.count, edge, stage.parts, live)
            if key not in known:
                cost = stage_cost(self.model, self.machines, spread, index, live, spread.ranks)
                if cost.lacking_bytes > 0:
                    return float("inf")
                known[key] = sum(cost.forward_s) + sum(cost.backward_s)
                after = max(after, cost.reduce_s + cost.update_s)
            slowest = max(slowest, known[key])
            total += known[key]
        return count * slowest + (total - slowest) / spread.chunks + after

    def _live(self, spread: Spread, index: int) -> int:
        """Chunks of micro-batches that a stage holds at the peak of the interleaved schedule (Narayanan et al.)."""
        stages, whole = len(spread.stages), spread.micro_batches * spread.chunks
        if spread.micro_batches == stages:
            return whole
        return min(whole, 2 * (stages - 1 - index) + (spread.chunks - 1) * stages + 1)

    def misfit(self, spread: Spread) -> None:
        """Keeps a spread that does not fit, with what it would take, for the list of what lost; small ones only."""
        if spread.micro_batches * len(spread.stages) < 5000:
            self.consider(spread)

    def _without_zero(self) -> None:
        """The best spread with the optimizer's state on every rank, where the user leaves that free."""
        if self.limits.zero is None:
            _, spread, _ = self.best
            s = spread
            self.consider(Spread(s.stages, s.micro_batches, s.recompute, s.sequence_parallel, 0, s.schedule))


def _with_another(spread: Spread, at: int, parts: tuple[Part, ...]) -> Iterator[Spread]:
    """The spread with a stage divided: some of its layers, at either end, go to another stage on other ranks."""
    low, high = spread.stages[at].layers[0]
    for cut in range(low + 1, high):
        kept, new = Stage(((low, cut),), spread.stages[at].parts), Stage(((cut, high),), parts)
        yield msgspec.structs.replace(spread, stages=(*spread.stages[:at], kept, new, *spread.stages[at + 1 :]))
        new, kept = Stage(((low, cut),), parts), Stage(((cut, high),), spread.stages[at].parts)
        yield msgspec.structs.replace(spread, stages=(*spread.stages[:at], new, kept, *spread.stages[at + 1 :]))


def move_cut(spread: Spread, at: int, move: int) -> Spread | None:
    """The spread with the cut after stage `at` moved by so many layers; None where a stage would be empty."""
    stages = list(spread.stages)
    (low, middle), (_, high) = stages[at].layers[0], stages[at + 1].layers[0]
    middle += move
    if not low < middle < high:
        return None
    stages[at] = Stage(((low, middle),), stages[at].parts)
    stages[at + 1] = Stage(((middle, high),), stages[at + 1].parts)
    s = spread
    return Spread(tuple(stages), s.micro_batches, s.recompute, s.sequence_parallel, s.zero, s.schedule)


def neighbours(spread: Spread, few: bool) -> Iterator[Spread]:
    """Spreads that differ little: a cut moved by a layer; with few devices also two stages' ranks exchanged."""
    count = len(spread.stages)
    for at in range(count - 1):
        for move in (1, -1, 2, -2) if few else (1, -1):
            if (moved := move_cut(spread, at, move)) is not None:
                yield moved
    if not few:
        return
    for one, other in itertools.combinations(range(count), 2):
        a, b = spread.stages[one], spread.stages[other]
        if a.parts == b.parts:
            continue
        stages = list(spread.stages)
        stages[one], stages[other] = Stage(a.layers, b.parts), Stage(b.layers, a.parts)
        exchanged = msgspec.structs.replace(spread, stages=tuple(stages))
        yield exchanged
        for at in {one - 1, one, other - 1, other} & set(range(count - 1)):
            for move in (1, -1):
                if (moved := move_cut(exchanged, at, move)) is not None:
                    yield moved


def search(model: Model, machines: Machines, batch: int, limits: Limits | None = None) -> Found:
    """The best spread of a model's training step over a cluster (see `Search`)."""
    if batch < 1:
        raise PlanError("the global batch must be positive", given=batch)
    return Search(model, machines, batch, limits or Limits()).run()
