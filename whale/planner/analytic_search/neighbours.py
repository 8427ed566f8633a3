"""Yields strategies that differ little from a given one: a cut moved, stages exchanged or reordered, a stage added.

`search` uses these moves where devices are few, and those of `moves` everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage

MOST_RUNS = 4  # with at most this many runs of equal stages, all orders of the runs are tried

StageRanks = tuple[tuple[int, ...], tuple[DeviceGroup, ...]]  # (devices of each pool, device groups) of one stage


def _with_another(strategy: ParallelStrategy, at: int, parts: tuple[DeviceGroup, ...]) -> Iterator[ParallelStrategy]:
    """Yields the strategy with stage `at` divided in two: at either end a new stage on `parts` takes some of its
    layers.
    """
    low, high = strategy.stages[at].layers[0]
    for cut in range(low + 1, high):
        kept, new = Stage(((low, cut),), strategy.stages[at].parts), Stage(((cut, high),), parts)
        yield msgspec.structs.replace(strategy, stages=(*strategy.stages[:at], kept, new, *strategy.stages[at + 1 :]))
        new, kept = Stage(((low, cut),), parts), Stage(((cut, high),), strategy.stages[at].parts)
        yield msgspec.structs.replace(strategy, stages=(*strategy.stages[:at], new, kept, *strategy.stages[at + 1 :]))


def move_cut(strategy: ParallelStrategy, at: int, move: int) -> ParallelStrategy | None:
    """Moves the boundary between stages `at` and `at` + 1 by ``move`` layers; None: a stage would be empty."""
    stages = list(strategy.stages)
    (low, middle), (_, high) = stages[at].layers[0], stages[at + 1].layers[0]
    middle += move
    if not low < middle < high:
        return None
    stages[at] = msgspec.structs.replace(stages[at], layers=((low, middle),))
    stages[at + 1] = msgspec.structs.replace(stages[at + 1], layers=((middle, high),))
    return msgspec.structs.replace(strategy, stages=tuple(stages))


def neighbours(strategy: ParallelStrategy) -> Iterator[ParallelStrategy]:
    """Yields strategies with a boundary between stages moved by one or two layers, or with two stages' ranks
    exchanged.
    """
    count = len(strategy.stages)
    for at in range(count - 1):
        for move in (1, -1, 2, -2):
            if (moved := move_cut(strategy, at, move)) is not None:
                yield moved
    for one, other in itertools.combinations(range(count), 2):
        a, b = strategy.stages[one], strategy.stages[other]
        if a.parts == b.parts:
            continue
        stages = list(strategy.stages)
        stages[one], stages[other] = Stage(a.layers, b.parts), Stage(b.layers, a.parts)
        exchanged = msgspec.structs.replace(strategy, stages=tuple(stages))
        yield exchanged
        yield _in_order(strategy, [*range(one), other, *range(one + 1, other), one, *range(other + 1, count)])
        for at in {one - 1, one, other - 1, other} & set(range(count - 1)):
            for move in (1, -1):
                if (moved := move_cut(exchanged, at, move)) is not None:
                    yield moved


def _in_order(strategy: ParallelStrategy, order: Sequence[int]) -> ParallelStrategy:
    """Returns the strategy with its stages in another order; each keeps its ranks and its number of layers."""
    stages, low = [], 0
    for at in order:
        stage = strategy.stages[at]
        stages.append(Stage(((low, low + stage.count),), stage.parts))
        low += stage.count
    return msgspec.structs.replace(strategy, stages=tuple(stages))


def other_orders(ranks: Sequence[tuple[DeviceGroup, ...]]) -> Iterator[list[tuple[DeviceGroup, ...]]]:
    """Yields other orders of the stages' device groups: runs of equal stages permuted, or one stage moved."""
    runs = [list(run) for _, run in itertools.groupby(ranks)]
    known = {tuple(ranks)}
    orders: list[list[tuple[DeviceGroup, ...]]] = []
    if len(runs) <= MOST_RUNS:
        orders += [list(itertools.chain(*order)) for order in itertools.permutations(runs)]
    starts = [0, *itertools.accumulate(map(len, runs[:-1]))] if len(runs) > 1 else []
    for at in starts:
        rest = [*ranks[:at], *ranks[at + 1 :]]
        orders += ([*rest[:to], ranks[at], *rest[to:]] for to in range(len(ranks)))
    for order in orders:
        if tuple(order) not in known:
            known.add(tuple(order))
            yield order


def other_ranks(
    strategy: ParallelStrategy, machines: Machines, choices: Sequence[StageRanks], more: bool
) -> Iterator[ParallelStrategy]:
    """Yields the strategy with other device groups for one stage, made of its own devices and idle ones.

    Args:
        choices: (devices of each pool, device groups) that one stage may have.
        more: the number of stages may grow: a stage is also divided in two.
    """
    free = [pool.devices for pool in machines.pools]
    for part in (p for stage in strategy.stages for p in stage.parts):
        free[part.pool] -= part.ranks
    by_use: dict[tuple[int, ...], list[tuple[DeviceGroup, ...]]] = {}
    for used, parts in choices:
        by_use.setdefault(used, []).append(parts)
    for at, stage in enumerate(strategy.stages):
        own, held = list(free), [0] * len(free)
        for part in stage.parts:
            own[part.pool] += part.ranks
            held[part.pool] += part.ranks
        if more:
            for used, parts in choices:  # two stages on the devices of this one
                rest = tuple(n - u for n, u in zip(held, used))
                for others in by_use.get(rest, ()):
                    ranks_given = msgspec.structs.replace(strategy, stages=tuple(
                        Stage(s.layers, parts) if i == at else s for i, s in enumerate(strategy.stages)
                    ))  # fmt: skip
                    yield from _with_another(ranks_given, at, others)
        for used, parts in choices:
            if parts != stage.parts and all(u <= n for u, n in zip(used, own)):
                stages = list(strategy.stages)
                stages[at] = Stage(stage.layers, parts)
                yield msgspec.structs.replace(strategy, stages=tuple(stages))
            if all(u <= n for u, n in zip(used, free)) and more:
                yield from _with_another(strategy, at, parts)
