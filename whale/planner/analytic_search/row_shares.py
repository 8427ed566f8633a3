"""Divides a micro-batch's rows among unequal replicas so that the slowest one is as fast as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from whale.ir.strategy import DeviceGroup

MOVES, MOVES_PER_KIND = 64, 4  # most corrections of a division (in all, and more per kind) before it is given up
LEAST_S = 1e-12  # least seconds of a row, so that speeds are finite


def row_shares(
    kinds: Sequence[tuple[int, int, int]], rows: int, seconds: Callable[[int, int, int], float], most: Sequence[int]
) -> tuple[DeviceGroup, ...] | None:
    """Returns the device groups of a stage with rows per replica; None: the rows cannot be divided among the replicas.

    With fewer rows than replicas, the fastest replicas get one row each and the others are left out.

    Args:
        kinds: (pool, tensor-parallel degree, replicas) of each kind of replica.
        rows: rows of a micro-batch, over all replicas.
        seconds: (pool, tensor, rows) -> seconds of a micro-batch of `rows`; must grow with rows.
        most: largest number of rows of one replica, per kind.
    """
    if sum(replicas * high for (_, _, replicas), high in zip(kinds, most)) < rows:
        return None
    total = sum(replicas for _, _, replicas in kinds)
    if rows < total:  # one row for each of the fastest replicas; the others stay idle
        order = sorted(range(len(kinds)), key=lambda k: seconds(kinds[k][0], kinds[k][1], 1))
        parts, left = [], rows
        for k in order:
            pool, tensor, replicas = kinds[k]
            if taken := min(left, replicas):
                parts.append(DeviceGroup(pool, tensor, taken, 1))
                left -= taken
        return tuple(parts)
    # In proportion to speed, then row by row: from the slowest replica, to the one that is fastest with one row more.
    speed = [1.0 / max(LEAST_S, seconds(p, t, min(m, max(1, rows // total)))) for (p, t, _), m in zip(kinds, most)]
    whole = sum(s * k[2] for s, k in zip(speed, kinds))
    own = [min(m, max(1, int(rows * s / whole))) for s, m in zip(speed, most)]
    more = [0] * len(kinds)  # replicas of a kind that have one row more
    left = rows - sum(n * k[2] for n, k in zip(own, kinds))
    for _ in range(MOVES_PER_KIND * len(kinds) + MOVES):
        if left == 0:
            break
        if left > 0:
            open_ = [k for k in range(len(kinds)) if own[k] < most[k]]
            if not open_:
                return None
            best = min(open_, key=lambda k: seconds(kinds[k][0], kinds[k][1], own[k] + 1))
            free = kinds[best][2] - more[best]
            taken = min(left, free)
            more[best] += taken
            left -= taken
            if more[best] == kinds[best][2]:
                own[best], more[best] = own[best] + 1, 0
        else:
            shrink = [k for k in range(len(kinds)) if own[k] > 1 or more[k]]
            if not shrink:
                return None
            worst = max(shrink, key=lambda k: seconds(kinds[k][0], kinds[k][1], own[k]))
            if more[worst] == 0:
                own[worst], more[worst] = own[worst] - 1, kinds[worst][2]
            taken = min(-left, more[worst])
            more[worst] -= taken
            left += taken
    if left:
        return None
    parts = []
    for (pool, tensor, replicas), n, extra in zip(kinds, own, more):
        if extra:
            parts.append(DeviceGroup(pool, tensor, extra, n + 1))
        if replicas > extra:
            parts.append(DeviceGroup(pool, tensor, replicas - extra, n))
    return tuple(parts)


def variants(parts: tuple[DeviceGroup, ...]) -> list[tuple[DeviceGroup, ...]]:
    """Returns `parts` and variants with rows moved between two pools: one row of one replica, which may fit where
    memory is short, and rows of all replicas of a group, which are faster only together.
    """
    found = [parts]
    for giver, taker in itertools.permutations(range(len(parts)), 2):
        give, take = parts[giver], parts[taker]
        if give.pool == take.pool or give.rows == 1:
            continue
        found.append(_move_rows(parts, {giver: (1, -1), taker: (1, 1)}))
        common = math.gcd(give.replicas, take.replicas)
        fewer, more = take.replicas // common, give.replicas // common
        if give.rows > fewer and (give.replicas, take.replicas) != (1, 1):
            found.append(_move_rows(parts, {giver: (give.replicas, -fewer), taker: (take.replicas, more)}))
    return found


def _move_rows(parts: Sequence[DeviceGroup], moved: dict[int, tuple[int, int]]) -> tuple[DeviceGroup, ...]:
    """Returns the groups with `moved`, {number of a group: (how many of its replicas, rows more in each)}."""
    counted: dict[tuple[int, int, int], int] = {}
    for at, part in enumerate(parts):
        replicas, more = moved.get(at, (0, 0))
        for rows, count in ((part.rows + more, replicas), (part.rows, part.replicas - replicas)):
            if count:
                key = part.pool, part.tensor, rows
                counted[key] = counted.get(key, 0) + count
    return tuple(DeviceGroup(pool, tensor, n, rows) for (pool, tensor, rows), n in counted.items())
