"""Yields strategies that differ from a given one in one change: of a stage's ranks, rows, micro-batches, or layers.

If a change of ranks needs more devices than there are, other stages are removed; if the change leaves devices idle,
stages are added. The caller assigns layers anew after a move of ranks; a move of layers is a complete strategy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from cost_model.cluster.pools import Machines, Pool
from whale.ir.strategy import DeviceGroup, ParallelStrategy
from whale.planner.analytic_search.estimate import divisors
from whale.planner.analytic_search.row_shares import row_shares, variants

Ranks = list[tuple[DeviceGroup, ...]]  # the parts of each stage, in order
FURTHEST = 2  # a move goes at most this many tensor degrees, or divisors, up or down
MOST_GROUPS = 12  # most sets of stages that are changed together
MOST_PAIRS = 120  # most pairs of stages between which a layer moves


def has_room(machines: Machines, ranks: Iterable[tuple[DeviceGroup, ...]]) -> bool:
    """Returns True if the hosts have room for all these tensor-parallel groups, none of which may span two hosts."""
    return next(_find_crowded(machines, ranks), None) is None


def _find_crowded(machines: Machines, ranks: Iterable[tuple[DeviceGroup, ...]]) -> Iterator[int]:
    """Yields the numbers of the pools whose hosts have no room for all of these tensor-parallel groups."""
    wanted: dict[int, dict[int, int]] = {}
    for parts, count in count_kinds(ranks).items():
        for part in parts:
            if (own := wanted.get(part.pool)) is None:
                own = wanted[part.pool] = {}
            own[part.tensor] = own.get(part.tensor, 0) + count * part.replicas
    for number, of_tensor in wanted.items():
        pool, groups = machines.pools[number], tuple(of_tensor.items())
        if len(groups) > 1:
            groups = tuple(sorted(groups, reverse=True))
        if not _fit_on_hosts(pool.entry.count, pool.host.count, groups):
            yield number


def count_kinds(ranks: Iterable[tuple[DeviceGroup, ...]]) -> dict[tuple[DeviceGroup, ...], int]:
    """Returns how many stages there are on each different tuple of device groups, in the order of the first of each.

    Most stages share the object that describes their groups, so that few of these are hashed.
    """
    objects = list(ranks)
    known, found = dict(zip(map(id, objects), objects)), dict[tuple[DeviceGroup, ...], int]()
    for one, count in Counter(map(id, objects)).items():
        found[known[one]] = found.get(known[one], 0) + count
    return found


@lru_cache(maxsize=1 << 16)
def _fit_on_hosts(per_host: int, hosts: int, groups: tuple[tuple[int, int], ...]) -> bool:
    """Returns True if `hosts` hosts with `per_host` devices each have room for all groups, none of which may span two
    hosts.

    Args:
        groups: (devices of a group, number of such groups), largest first.
    """
    if sum(tensor * count for tensor, count in groups) > per_host * hosts:
        return False
    free = [(per_host, hosts)]  # runs of hosts with equally many free devices
    for tensor, left in groups:
        after: list[tuple[int, int]] = []
        for devices, hosts in free:
            each = devices // tensor
            full = min(hosts, left // each) if each else 0
            left -= full * each
            after.append((devices - full * each * tensor if full else devices, full)) if full else None
            rest = hosts - full
            if rest and each and left:
                after.append((devices - left * tensor, 1))
                left, rest = 0, rest - 1
            if rest:
                after.append((devices, rest))
        if left:
            return False
        free = after
    return True


@dataclass(frozen=True)
class Moves:
    """Makes the changes of a strategy that a model, its machines and the user's constraints allow.

    Attributes:
        layers: number of the model's layers.
        batch: rows of a step, times `context`.
        tensors: pool -> tensor-parallel degrees allowed there.
        allowed: returns True if a stage may contain a device group.
        seconds: (pool, tensor, rows, ways) -> seconds of a micro-batch, by which unequal replicas share rows; see
            `Estimates.predict_whole` for `ways`.
        most_rows: (pool, tensor) -> largest micro-batch of a rank.
        runnable: the replicas of a stage must have equal tensor-parallel degrees.
        context: context-parallel degree; above 1 the replicas of each device group are a multiple of it, with equal
            rows.
        experts: the replicas of a stage have to be a multiple of this.
        known: results of `allows`.
    """

    machines: Machines
    layers: int
    batch: int
    tensors: Callable[[int], list[int]]
    allowed: Callable[[DeviceGroup], bool]
    seconds: Callable[[int, int, int, int], float]
    most_rows: Callable[[int, int], int]
    runnable: bool
    context: int = 1
    experts: int = 1
    known: dict[tuple[DeviceGroup, ...], bool] = field(default_factory=dict)

    def of_ranks(self, strategy: ParallelStrategy) -> Iterator[tuple[int, Ranks]]:
        """Yields (micro-batches, device groups of each stage) after each change that requires layers to be assigned
        anew.
        """
        ranks, ways = [stage.parts for stage in strategy.stages], strategy.expert_ranks
        numbered = _Numbered()
        known = {(strategy.micro_batches, numbered.number(ranks))}
        for micro_batches, changed in itertools.chain(
            self._other_parts(strategy.micro_batches, ranks, ways),
            self._other_counts(strategy.micro_batches, ranks),
            self._other_micro_batches(strategy.micro_batches, ranks, ways),
            self._without_pools(strategy.micro_batches, ranks, ways),
            self._other_orders(strategy.micro_batches, ranks),
        ):
            if not 0 < len(changed) <= self.layers or (key := (micro_batches, numbered.number(changed))) in known:
                continue
            known.add(key)
            if all(map(self.allows, count_kinds(changed))) and has_room(self.machines, changed):
                yield micro_batches, changed

    def allows(self, parts: tuple[DeviceGroup, ...]) -> bool:
        """Returns True if a stage may consist of these device groups: degrees, rows and replicas are all allowed."""
        if (found := self.known.get(parts)) is None:
            found = self.known[parts] = self._may_be(parts)
        return found

    def _may_be(self, parts: tuple[DeviceGroup, ...]) -> bool:
        if any(part.tensor not in self.tensors(part.pool) for part in parts):
            return False
        alike = not self.runnable or len({part.tensor for part in parts}) == 1
        if self.context > 1 and (
            len({part.rows for part in parts}) > 1 or any(part.replicas % self.context for part in parts)
        ):
            return False
        if sum(part.replicas for part in parts) % self.experts:
            return False
        return alike and all(part.rows >= 1 and self.allowed(part) for part in parts)

    def _groups(self, ranks: Ranks) -> list[frozenset[int]]:
        """Returns the sets of stages whose ranks a move may change together, at most `MOST_GROUPS`.

        These are all stages, the first and the last one, either of these alone, and for each run of consecutive equal
        stages: the run, all stages of the plan that are equal to it, and its last stage.
        """
        last = len(ranks) - 1
        found = [frozenset(range(last + 1)), frozenset({0, last}), frozenset({0}), frozenset({last})]
        at = 0
        for parts, run in itertools.groupby(ranks):
            length = len(list(run))
            found.append(frozenset(range(at, at + length)))
            found.append(frozenset(i for i, one in enumerate(ranks) if one == parts))
            found.append(frozenset({at + length - 1}))
            at += length
        return list(dict.fromkeys(found))[:MOST_GROUPS]

    def _other_parts(self, micro_batches: int, ranks: Ranks, ways: int) -> Iterator[tuple[int, Ranks]]:
        """Yields changes of some stages' tensor-parallel degree, replicas, rows per replica, or pool.

        Args:
            ways: the strategy's expert-parallel degree (see `share`).
        """
        for group in self._groups(ranks):
            new: dict[tuple[DeviceGroup, ...], list[tuple[DeviceGroup, ...]]] = {}
            for parts in dict.fromkeys(ranks[i] for i in sorted(group)):
                new[parts] = list(dict.fromkeys(self._other_parts_of(parts, len(ranks), ways)))
            # Stages on different groups are changed one kind at a time, or all by their changes with equal index.
            for kinds in ([[one] for one in new] if len(new) > 1 else []) + [list(new)]:
                for number in range(min(len(new[one]) for one in kinds)):
                    changed = [new[p][number] if i in group and p in kinds else p for i, p in enumerate(ranks)]
                    yield from ((micro_batches, one) for one in self._paid(changed, group))

    def _other_parts_of(
        self, parts: tuple[DeviceGroup, ...], stages: int, ways: int
    ) -> Iterator[tuple[DeviceGroup, ...]]:
        if len(parts) > 1:
            yield from self._other_mixes(parts, ways)
            return
        (part,) = parts
        rows, pools = part.rows * part.replicas, self.machines.pools
        for tensor in _near(self.tensors(part.pool), part.tensor):
            yield (msgspec.structs.replace(part, tensor=tensor),)
            replicas, odd = divmod(part.ranks, tensor)
            if not odd and rows % replicas == 0:
                yield (DeviceGroup(part.pool, tensor, replicas, rows // replicas),)
        for replicas in _near(divisors(rows), part.replicas):
            yield (DeviceGroup(part.pool, part.tensor, replicas, rows // replicas),)
            tensor, odd = divmod(part.ranks, replicas)
            if not odd and tensor in self.tensors(part.pool):
                yield (DeviceGroup(part.pool, tensor, replicas, rows // replicas),)
        for replicas in pools[part.pool].list_whole_hosts(part.tensor, part.replicas):
            if rows % replicas and (found := self.share({(part.pool, part.tensor): replicas}, rows, ways)):
                yield found
        for pool in pools:
            if pool.number != part.pool:
                for tensor in {part.tensor, *_near(self.tensors(pool.number), part.tensor)}:
                    if tensor in self.tensors(pool.number):
                        yield (DeviceGroup(pool.number, tensor, part.replicas, part.rows),)
                yield from self._mixed_with(part, pool, stages, ways)

    def _mixed_with(self, part: DeviceGroup, pool: Pool, stages: int, ways: int) -> Iterator[tuple[DeviceGroup, ...]]:
        """Yields stages that share the rows of `part` between its replicas and some on `pool`, in proportion to their
        speed.

        The numbers of replicas on `pool` to try are one; half as many as `part` has, as many, and twice as many; an
        equal part of the pool for each of `stages` stages; and the whole pool.

        Args:
            part: replicas of a stage, all on one pool.
            pool: the pool to add replicas on.
            stages: number of stages that may be changed alike.
            ways: the strategy's expert-parallel degree (see `share`).
        """
        if part.tensor not in self.tensors(pool.number):
            return
        most, rows = pool.tensor_groups(part.tensor), part.rows * part.replicas
        for replicas in sorted({1, part.replicas // 2, part.replicas, 2 * part.replicas, most // stages, most}):
            if 0 < replicas <= most:
                kinds = {(part.pool, part.tensor): part.replicas, (pool.number, part.tensor): replicas}
                if found := self.share(kinds, rows, ways):
                    yield found

    def _other_mixes(self, parts: tuple[DeviceGroup, ...], ways: int) -> Iterator[tuple[DeviceGroup, ...]]:
        """Yields changes of a stage with unequal replicas: of their rows, their numbers, or their tensor-parallel
        degree.

        Args:
            ways: the strategy's expert-parallel degree (see `share`).
        """
        rows = sum(part.replicas * part.rows for part in parts)
        yield from variants(parts)[1:]
        kinds: dict[tuple[int, int], int] = {}
        for part in parts:
            kinds[part.pool, part.tensor] = kinds.get((part.pool, part.tensor), 0) + part.replicas
        for key, count in kinds.items():
            whole = self.machines.pools[key[0]].list_whole_hosts(key[1], count)
            for replicas in {count - 1, count + 1, count // 2, 2 * count, 0, *whole}:
                if replicas != count and (found := self.share({**kinds, key: replicas}, rows, ways)):
                    yield found
        if ways and (found := self.share(kinds, rows, ways)):  # rows may have been shared under another degree
            yield found
        for factor in (2, 0.5):
            other = {(pool, int(tensor * factor)): int(n / factor) for (pool, tensor), n in kinds.items()}
            fits = all(tensor in self.tensors(pool) for pool, tensor in other)
            if fits and (found := self.share(other, rows, ways)):
                yield found

    def share(self, kinds: dict[tuple[int, int], int], rows: int, ways: int) -> tuple[DeviceGroup, ...] | None:
        """Returns device groups whose replicas share `rows` by speed; None: there are fewer rows than replicas, too
        many rows, or no such degree on a pool.

        Args:
            kinds: {(pool, tensor-parallel degree): number of replicas}.
            ways: expert-parallel degree with which speeds are computed (`Estimates.predict_whole`): devices that are
                fast by themselves may be slow at exchanging tokens.
        """

        def predict_s(pool: int, tensor: int, n: int) -> float:
            return self.seconds(pool, tensor, n, ways)

        own = [(pool, tensor, n) for (pool, tensor), n in kinds.items() if n > 0]
        if not own or sum(n for _, _, n in own) > rows:
            return None
        if any(tensor not in self.tensors(pool) for pool, tensor, _ in own):  # an earlier change left such a degree
            return None
        return row_shares(own, rows, predict_s, [self.most_rows(pool, tensor) for pool, tensor, _ in own])

    def _other_counts(self, micro_batches: int, ranks: Ranks) -> Iterator[tuple[int, Ranks]]:
        """Yields changes of the number of stages: one removed, a copy of one added, a run halved or doubled, one added
        on a pool.
        """
        at = 0
        rows = sum(part.rows * part.replicas for part in ranks[0])
        for parts, run in itertools.groupby(ranks):
            length = len(list(run))
            if len(ranks) > 1:
                yield micro_batches, [*ranks[:at], *ranks[at + 1 :]]
            yield micro_batches, [*ranks[:at], parts, *ranks[at:]]
            for count in {length // 2, 2 * length} - {0, length}:
                yield micro_batches, [*ranks[:at], *[parts] * count, *ranks[at + length :]]
            at += length
        for pool in self.machines.pools:
            for tensor in self.tensors(pool.number):
                for replicas in divisors(rows):
                    own = (DeviceGroup(pool.number, tensor, replicas, rows // replicas),)
                    if tensor * replicas <= pool.devices and self.allows(own):
                        for place in {0, 1, len(ranks) - 1, len(ranks)}:
                            yield micro_batches, [*ranks[:place], own, *ranks[place:]]

    def _other_micro_batches(self, micro_batches: int, ranks: Ranks, ways: int) -> Iterator[tuple[int, Ranks]]:
        """Yields changes of the number of micro-batches, compensated by rows per replica or by the number of
        replicas.

        Args:
            ways: the strategy's expert-parallel degree (see `share`).
        """
        for other in _near(divisors(self.batch), micro_batches, 3):
            of: dict[tuple[DeviceGroup, ...], tuple[DeviceGroup, ...] | None] = {}
            for parts in dict.fromkeys(ranks):
                of[parts] = self.with_rows(parts, self.batch // other, ways)
            if all(of.values()):
                yield other, [of[parts] or parts for parts in ranks]
            more: dict[tuple[DeviceGroup, ...], tuple[DeviceGroup, ...]] = {}
            for parts in dict.fromkeys(ranks):
                if all(part.replicas * micro_batches % other == 0 for part in parts):
                    more[parts] = tuple(
                        msgspec.structs.replace(part, replicas=part.replicas * micro_batches // other) for part in parts
                    )
            if len(more) == len(set(ranks)):
                changed = [more[parts] for parts in ranks]
                yield from ((other, one) for one in self._paid(changed, frozenset()))

    def with_rows(self, parts: tuple[DeviceGroup, ...], rows: int, ways: int) -> tuple[DeviceGroup, ...] | None:
        """Returns the same replicas with `rows` rows of a micro-batch in all; None: the replicas cannot divide them.

        Args:
            ways: the strategy's expert-parallel degree (see `share`).
        """
        if len(parts) == 1:
            replicas = parts[0].replicas
            return None if rows % replicas else (msgspec.structs.replace(parts[0], rows=rows // replicas),)
        kinds: dict[tuple[int, int], int] = {}
        for part in parts:
            kinds[part.pool, part.tensor] = kinds.get((part.pool, part.tensor), 0) + part.replicas
        return self.share(kinds, rows, ways)

    def _without_pools(self, micro_batches: int, ranks: Ranks, ways: int) -> Iterator[tuple[int, Ranks]]:
        """Yields the ranks without one pool: its stages removed, and its replicas removed from stages that have
        others.

        Args:
            ways: the strategy's expert-parallel degree (see `share`).
        """
        used = {part.pool for parts in ranks for part in parts}
        rows = sum(part.rows * part.replicas for part in ranks[0])
        for pool in sorted(used) if len(used) > 1 else ():
            left: Ranks = []
            for parts in ranks:
                kept = {(p.pool, p.tensor): 0 for p in parts if p.pool != pool}
                for part in parts:
                    if part.pool != pool:
                        kept[part.pool, part.tensor] += part.replicas
                own = parts if all(p.pool != pool for p in parts) else self.share(kept, rows, ways) if kept else None
                left += [own] if own else []
            yield from ((micro_batches, one) for one in self._paid(left, frozenset()))

    def _other_orders(self, micro_batches: int, ranks: Ranks) -> Iterator[tuple[int, Ranks]]:
        """Yields other orders of stages: two neighbouring runs of equal stages exchanged, or one stage moved to either
        end.
        """
        runs = [list(run) for _, run in itertools.groupby(ranks)]
        if len(runs) == 1:
            return
        for at in range(len(runs) - 1):
            order = [*runs[:at], runs[at + 1], runs[at], *runs[at + 2 :]]
            yield micro_batches, list(itertools.chain(*order))
        at = 0
        for run in runs:
            rest = [*ranks[:at], *ranks[at + 1 :]]
            yield micro_batches, [run[0], *rest]
            yield micro_batches, [*rest, run[0]]
            at += len(run)

    def _paid(self, ranks: Ranks, kept: frozenset[int]) -> Iterator[Ranks]:
        """Yields `ranks` in a form for which there are enough devices, and the same with stages added on idle devices.

        If a move has made some stages larger, stages on the pools that lack devices are removed, one by one. Nothing is
        yielded if that does not succeed.

        Args:
            ranks: device groups of each stage.
            kept: stages that were just changed and should stay; all others are removed before any of these.
        """
        marked = [(parts, i in kept) for i, parts in enumerate(ranks)]
        while over := set(_find_crowded(self.machines, [parts for parts, _ in marked])):
            able = [
                i for i, (parts, keep) in enumerate(marked) if not keep and any(part.pool in over for part in parts)
            ]
            if not able or len(marked) == 1:
                able = [i for i, (parts, _) in enumerate(marked) if any(part.pool in over for part in parts)]
                if len(marked) <= 2 or not able:
                    return
            del marked[able[len(able) // 2]]
        found = [parts for parts, _ in marked]
        yield found
        more = self._filled(found)
        if len(more) > len(found):
            yield more

    def _filled(self, ranks: Ranks) -> Ranks:
        """Returns the ranks with copies of each pool's most frequent stage added as long as its devices suffice."""
        found = list(ranks)
        for pool in self.machines.pools:
            own = [parts for parts in ranks if len(parts) == 1 and parts[0].pool == pool.number]
            if not own:
                continue
            like = max(own, key=own.count)
            at = found.index(like)
            # The added stages are equal, so that bisection finds how many of them there is room for.
            free = pool.devices - sum(p.ranks for parts in found for p in parts if p.pool == pool.number)
            low, high = 0, min(free // like[0].ranks, self.layers - len(found))
            while low < high:
                middle = (low + high + 1) // 2
                if has_room(self.machines, [*found, *[like] * middle]):
                    low = middle
                else:
                    high = middle - 1
            found[at:at] = [like] * low
        return found


class _Numbered:
    """Numbers tuples of device groups, so that lists of them are compared without looking at each group."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[DeviceGroup, ...], int] = {}
        self._objects: dict[int, tuple[int, tuple[DeviceGroup, ...]]] = {}  # kept, so that no other gets their id

    def number(self, ranks: Ranks) -> tuple[int, ...]:
        """Returns the number of each tuple of groups, equal for equal ones."""
        known = self._objects
        try:
            return tuple([known[id(parts)][0] for parts in ranks])
        except KeyError:
            for parts in ranks:
                if id(parts) not in known:
                    known[id(parts)] = self._numbers.setdefault(parts, len(self._numbers)), parts
            return tuple([known[id(parts)][0] for parts in ranks])


def layer_moves(strategy: ParallelStrategy, seconds: Sequence[float]) -> Iterator[ParallelStrategy]:
    """Yields the strategy with one layer moved from one range to another, which need not be neighbours.

    In a run of equal stages only the first two and the last two take part, since embedding and head lie at the ends.
    Moves from the slowest to the fastest stage come first.

    Args:
        seconds: seconds of one micro-batch on each stage.
    """
    counts = [high - low for _, low, high in strategy.ordered_layers]
    parts = [stage.parts for stage, _, _ in strategy.ordered_layers]
    ends: list[int] = []
    for _, run in itertools.groupby(range(len(counts)), key=lambda i: (parts[i], counts[i])):
        own = list(run)
        ends += dict.fromkeys((*own[:2], *own[-2:]))
    ends = list(dict.fromkeys([0, *ends, len(counts) - 1]))
    pairs = [(a, b) for a, b in itertools.permutations(ends, 2) if counts[a] > 1]
    stages = len(strategy.stages)
    pairs.sort(key=lambda pair: seconds[pair[1] % stages] - seconds[pair[0] % stages])
    for giver, taker in pairs[:MOST_PAIRS]:
        other = list(counts)
        other[giver], other[taker] = other[giver] - 1, other[taker] + 1
        yield with_counts(strategy, other)


def with_counts(strategy: ParallelStrategy, counts: Sequence[int]) -> ParallelStrategy:
    """Returns the strategy with `counts[i]` layers in its i-th range of layers, ranges in model order (chunk by
    chunk).
    """
    stages = len(strategy.stages)
    ends = [0, *itertools.accumulate(counts)]
    return msgspec.structs.replace(
        strategy,
        stages=tuple(
            msgspec.structs.replace(stage, layers=tuple((ends[i], ends[i + 1]) for i in range(s, len(counts), stages)))
            for s, stage in enumerate(strategy.stages)
        ),
    )


def _near(values: Sequence[int], one: int, furthest: int = FURTHEST) -> list[int]:
    """Returns members of the ascending `values` near `one`: up to `furthest` on each side, twice, half, 4 times, a
    quarter.
    """
    below = [v for v in values if v < one][-furthest:]
    above = [v for v in values if v > one][:furthest]
    more = [v for v in (2 * one, one // 2, 4 * one, one // 4) if v in values and v != one]
    return list(dict.fromkeys([*reversed(below), *above, *more]))
