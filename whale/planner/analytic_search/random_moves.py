"""Changes a strategy at random, one to three changes at once: of stages' ranks, number or order, of rows, or of layers.

The moves of `moves` are enumerated one at a time; this module finds gains that need several moves together. A try takes
a fraction of a millisecond, since a lower bound of the step rejects most of them before simulation.

Decision: 0189.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.planner.analytic_search.estimate import divisors
from whale.planner.analytic_search.moves import Moves, Ranks, count_kinds, has_room, with_counts
from whale.planner.analytic_search.row_shares import variants

Counts = list[int]  # layers of each range, in the order of the model: chunk by chunk


UNEVEN = 0.3  # of the changes of a number of replicas, those to any number, which need not divide the rows


class RandomMoves:
    """Makes random changes of strategies.

    Args:
        moves: the machines, and what is allowed on them.
        zeros: ZeRO levels to choose from.
        experts: expert-parallel degrees to choose from (0: as many replicas as can divide the experts).
        chunks: largest number of model chunks of a stage.
    """

    def __init__(self, moves: Moves, zeros: list[int], experts: list[int], chunks: int) -> None:
        self.moves, self.zeros, self.experts, self.chunks = moves, zeros, experts, chunks
        self.ways: list[Callable[[random.Random, ParallelStrategy], ParallelStrategy | None]] = [
            self._other_tensor, self._other_replicas, self._other_pool, self._mix, self._other_micro_batches,
            self._insert, self._remove, self._exchange, self._other_chunks, self._other_settings,
            *[self._move_layers] * 4,
        ]  # fmt: skip

    def change(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Returns the strategy after one to three random changes; None: nothing changed, or the devices do not allow
        the result.
        """
        found = strategy
        for _ in range(r.choice((1, 1, 2, 2, 3))):
            found = r.choice(self.ways)(r, found) or found
        ranks = [stage.parts for stage in found.stages]
        if (
            found is strategy
            or not all(map(self.moves.allows, count_kinds(ranks)))
            or not has_room(self.moves.machines, ranks)
        ):
            return None
        return found

    def _pick(self, r: random.Random, ranks: Ranks) -> set[int]:
        """Returns the stages to change, at random: one stage, the first and the last, all stages with the same ranks as
        one, all stages, or some consecutive ones.
        """
        last, at = len(ranks) - 1, r.randrange(len(ranks))
        alike = {i for i, parts in enumerate(ranks) if parts == ranks[at]}
        run = set(range(at, min(last, at + r.randrange(len(ranks))) + 1))
        return r.choice(({at}, {0, last}, alike, set(range(last + 1)), run))

    def _with_parts(
        self, strategy: ParallelStrategy, some: set[int], parts: tuple[DeviceGroup, ...] | None
    ) -> ParallelStrategy | None:
        if not parts:
            return None
        stages = [Stage(s.layers, parts if i in some else s.parts) for i, s in enumerate(strategy.stages)]
        return msgspec.structs.replace(strategy, stages=tuple(stages))

    def _single(self, r: random.Random, strategy: ParallelStrategy) -> tuple[set[int], DeviceGroup]:
        some = self._pick(r, [stage.parts for stage in strategy.stages])
        return some, r.choice(strategy.stages[min(some)].parts)

    def _other_tensor(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        some, part = self._single(r, strategy)
        parts, tensor = strategy.stages[min(some)].parts, r.choice(self.moves.tensors(part.pool))
        if len(parts) > 1 or r.random() < 0.5:
            return self._with_parts(strategy, some, tuple(msgspec.structs.replace(p, tensor=tensor) for p in parts))
        return self._with_parts(strategy, some, _divide_rows(part.pool, tensor, part.ranks // tensor, strategy))

    def _other_replicas(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        some, part = self._single(r, strategy)
        if r.random() < UNEVEN:
            kinds = {(part.pool, part.tensor): r.randint(1, 2 * part.replicas)}
            return self._with_parts(
                strategy, some, self.moves.share(kinds, strategy.stages[0].rows, strategy.expert_ranks)
            )
        replicas = r.choice(divisors(strategy.stages[0].rows))
        tensor = part.tensor if r.random() < 0.5 else part.ranks // replicas
        if tensor not in self.moves.tensors(part.pool):
            return None
        return self._with_parts(strategy, some, _divide_rows(part.pool, tensor, replicas, strategy))

    def _other_pool(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        some, part = self._single(r, strategy)
        pool = r.randrange(len(self.moves.machines.pools))
        if pool == part.pool or part.tensor not in self.moves.tensors(pool):
            return None
        return self._with_parts(
            strategy, some, _divide_rows(pool, part.tensor, strategy.stages[min(some)].replicas, strategy)
        )

    def _mix(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Changes how many replicas of one pool some stages have, with rows by speed; or moves a row between two
        pools.
        """
        some, _ = self._single(r, strategy)
        parts, pools = strategy.stages[min(some)].parts, self.moves.machines.pools
        if len(parts) > 1 and r.random() < 0.3:
            return self._with_parts(strategy, some, r.choice(variants(parts)))
        kinds: dict[tuple[int, int], int] = {}
        for part in parts:
            kinds[part.pool, part.tensor] = kinds.get((part.pool, part.tensor), 0) + part.replicas
        pool, tensor = r.choice(pools), parts[0].tensor
        most = pool.tensor_groups(tensor)
        if tensor not in self.moves.tensors(pool.number) or not most:
            return None
        now = kinds.get((pool.number, tensor), 0)
        kinds[pool.number, tensor] = r.choice((0, now + 1, max(0, now - 1), r.randint(0, most), most // len(some)))
        mixed = self.moves.share(kinds, strategy.stages[0].rows, strategy.expert_ranks)
        return self._with_parts(strategy, some, mixed)

    def _other_micro_batches(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        known = divisors(self.moves.batch)
        at = known.index(strategy.micro_batches) + r.choice((-3, -2, -1, 1, 2, 3))
        if not 0 <= at < len(known):
            return None
        of: dict[tuple[DeviceGroup, ...], tuple[DeviceGroup, ...] | None] = {}
        for stage in strategy.stages:
            if stage.parts not in of:
                rows = self.moves.batch // known[at]
                of[stage.parts] = self.moves.with_rows(stage.parts, rows, strategy.expert_ranks)
        if not all(of.values()):
            return None
        stages = tuple(Stage(stage.layers, of[stage.parts] or ()) for stage in strategy.stages)
        return msgspec.structs.replace(strategy, micro_batches=known[at], stages=stages)

    def _insert(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Adds a copy of a random stage's ranks after a random stage, which gives it half of its layers."""
        ranks, counts, stages = *_of(strategy), len(strategy.stages)
        at, like = r.randrange(stages), r.randrange(stages)
        new: Counts = []
        for number, count in enumerate(counts):
            new.append(count)
            if number % stages == at:
                new[-1:] = [count - count // 2, count // 2]
        return _build(strategy, [*ranks[: at + 1], ranks[like], *ranks[at + 1 :]], new)

    def _remove(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Removes a random stage and gives its layers to its neighbours; None: there is only one stage."""
        ranks, counts, stages = *_of(strategy), len(strategy.stages)
        if stages == 1:
            return None
        at, new = r.randrange(stages), list[int]()
        for first in range(0, len(counts), stages):
            own = counts[first : first + stages]
            left = own[at] // 2
            if at:
                own[at - 1] += left if at < stages - 1 else own[at]
            if at < stages - 1:
                own[at + 1] += own[at] - (left if at else 0)
            new += own[:at] + own[at + 1 :]
        if stages == 2:
            new = [sum(new)]
        return _build(strategy, [*ranks[:at], *ranks[at + 1 :]], new)

    def _exchange(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        ranks, counts = _of(strategy)
        if len(ranks) == 1:
            return None
        one, other = r.sample(range(len(ranks)), 2)
        ranks[one], ranks[other] = ranks[other], ranks[one]
        if r.random() < 0.5:
            for first in range(0, len(counts), len(ranks)):
                a, b = first + one, first + other
                counts[a], counts[b] = counts[b], counts[a]
        return _build(strategy, ranks, counts)

    def _other_chunks(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        """Changes the number of model chunks of the stages and divides each stage's layers over its chunks."""
        ranks, counts, stages = *_of(strategy), len(strategy.stages)
        most = min(self.chunks, self.moves.layers // stages)
        chunks = r.choice((1, strategy.chunks - 1, strategy.chunks + 1, 2 * strategy.chunks, r.randint(1, most)))
        if stages == 1 or not 0 < chunks <= most:
            return None
        own = [sum(counts[stage::stages]) for stage in range(stages)]
        if min(own) < chunks:
            own = [self.moves.layers // stages + (i < self.moves.layers % stages) for i in range(stages)]
        return _build(strategy, ranks, [n // chunks + (c < n % chunks) for c in range(chunks) for n in own])

    def _other_settings(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        return msgspec.structs.replace(strategy, zero=r.choice(self.zeros), expert_ranks=r.choice(self.experts))

    def _move_layers(self, r: random.Random, strategy: ParallelStrategy) -> ParallelStrategy | None:
        counts = _of(strategy)[1]
        if len(counts) == 1:
            return None
        moved = r.choice((1, 1, 2, 3))  # at a time, once or several times
        for _ in range(1 if moved > 1 else r.choice((1, 1, 2, 4))):
            giver, taker = r.sample(range(len(counts)), 2)
            counts[giver], counts[taker] = counts[giver] - moved, counts[taker] + moved
        return with_counts(strategy, counts) if min(counts) > 0 else None


def _divide_rows(pool: int, tensor: int, replicas: int, strategy: ParallelStrategy) -> tuple[DeviceGroup, ...] | None:
    rows, odd = divmod(strategy.stages[0].rows, max(1, replicas))
    return None if odd or replicas < 1 else (DeviceGroup(pool, tensor, replicas, rows),)


def _of(strategy: ParallelStrategy) -> tuple[Ranks, Counts]:
    return [stage.parts for stage in strategy.stages], [high - low for _, low, high in strategy.ordered_layers]


def _build(strategy: ParallelStrategy, ranks: Ranks, counts: Counts) -> ParallelStrategy | None:
    """Returns the strategy with these device groups and layers per range; None: a range would be empty."""
    if min(counts) < 1:
        return None
    stages = tuple(Stage((), parts) for parts in ranks)
    return with_counts(msgspec.structs.replace(strategy, stages=stages), counts)
