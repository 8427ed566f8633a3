"""For few devices: every assignment of device groups to stages, by dynamic programming.

State: the devices that later stages use, the first layer of what they hold, and how many stages they are (which says
how many micro-batches a stage before them holds in memory). For a limit on the slowest stage the program finds the
smallest sum of the stages' seconds; a step takes about sum + (micro-batches - 1) x slowest. All limits of a grid are
solved at once, as an axis of the arrays; then the best few chains are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .estimate import divisors
from .evaluate import layers_of, part_memory, reduction_s
from .shares import shares, variants
from .spread import Part, Spread, Stage

if TYPE_CHECKING:
    from .search import Search

GRID = 40  # limits on the slowest stage
WORK = 60_000  # pairs of (devices of a stage, devices of later ones) x numbers of later stages, at most


@dataclass(frozen=True, slots=True)
class _Option:
    """One stage's ranks: how many devices of each pool it uses, its parts, and seconds[low, high] of its layers."""

    used: tuple[int, ...]
    parts: tuple[Part, ...]
    seconds: np.ndarray
    after_s: np.ndarray
    fits: np.ndarray  # [live - 1, low, high]


def exact(search: Search) -> Iterator[Spread]:
    """The best spreads for every number of micro-batches, without interleaving; best first within each."""
    pools = search.machines.pools
    sizes = tuple(pool.devices for pool in pools)
    states = list(itertools.product(*(range(n + 1) for n in sizes)))
    pairs = 1
    for n in sizes:
        pairs *= (n + 1) * (n + 2) // 2
    if pairs * min(sum(sizes), search.model.count) > WORK:
        return
    found: list[tuple[float, Spread]] = []
    for micro_batches in reversed(divisors(search.batch)):
        if search.limits.micro_batches not in (None, micro_batches):
            continue
        for how in search.recomputes():
            if search.late(0.9):
                break
            settings = search.settings(micro_batches, how)
            options = _options(search, states, settings)
            key = (micro_batches, *how)
            search.choices[key] = [(o.used, o.parts) for o in options]
            if options:
                found += _solve(search, sizes, states, settings, options)
    found.sort(key=lambda e: e[0])
    for seconds, spread in found[:200]:
        if found and seconds > 1.25 * found[0][0]:
            return
        yield spread


def _options(search: Search, states: list[tuple[int, ...]], settings: Spread) -> list[_Option]:
    """What a stage may lie on: any devices, with one tensor degree per pool, rows by speed."""
    rows = search.batch // settings.micro_batches
    how = (settings.recompute, settings.sequence_parallel)
    pools, count = search.machines.pools, search.model.count
    stages = min(search.machines.devices, count)
    result = []
    for used in states:
        chosen = [k for k, n in enumerate(used) if n]
        if not chosen:
            continue
        best: dict[tuple[Part, ...], None] = {}
        for tensors in itertools.product(*(search.tensors(k) for k in chosen)):
            if any(used[k] % t for k, t in zip(chosen, tensors)):
                continue
            if any(used[k] // t > pools[k].units(t) for k, t in zip(chosen, tensors)):
                continue
            kinds = tuple((k, t, used[k] // t) for k, t in zip(chosen, tensors))
            if sum(k[2] for k in kinds) > rows or search.limits.data not in (None, sum(k[2] for k in kinds)):
                continue
            most = [search.rows_of(k, t)[-1] for k, t, _ in kinds]
            parts = shares(kinds, rows, lambda p, t, n: search.whole(p, t, n, how)[1], most)
            if parts is not None:
                known = {p: search.rows_of(p.pool, p.tensor) for one in variants(parts) for p in one}
                good = (one for one in variants(parts) if all(known[p][0] <= p.rows <= known[p][-1] for p in one))
                best.update(dict.fromkeys(good))
        for parts in best:
            result.append(_option(search, used, parts, settings, stages, count))
    return result


def _option(
    search: Search, used: tuple[int, ...], parts: tuple[Part, ...], settings: Spread, stages: int, count: int
) -> _Option:
    replicas = sum(p.replicas for p in parts)
    costs = [layers_of(search.model, settings, part, search.ranks, replicas) for part in parts]
    seconds = np.full((count + 1, count + 1), np.inf)
    after_s = np.zeros((count + 1, count + 1))
    fits = np.zeros((stages, count + 1, count + 1), dtype=bool)
    for low in range(count):
        for high in range(low + 1, count + 1):
            seconds[low, high] = max(c.forward(low, high) for c in costs) + max(c.backward(low, high) for c in costs)
            ranges = ((low, high),)
            own = [c.parameters_of(ranges) for c in costs]
            after_s[low, high] = reduction_s(search.model, search.machines, parts, own, settings.zero)
            for live in range(1, min(stages, settings.micro_batches) + 1):
                fits[live - 1, low, high] = all(
                    part_memory(
                        c, ranges, p, replicas, live, settings.zero, 2 if stages > 1 else 1, settings.offload
                    ).total_bytes
                    <= search.machines.pools[p.pool].memory_bytes
                    for c, p in zip(costs, parts)
                )
                if not fits[live - 1, low, high]:
                    break
    for live in range(min(stages, settings.micro_batches), stages):
        fits[live] = fits[settings.micro_batches - 1]
    return _Option(used, parts, seconds, after_s, fits)


def _solve(
    search: Search, sizes: tuple[int, ...], states: list[tuple[int, ...]], settings: Spread, options: list[_Option]
) -> list[tuple[float, Spread]]:
    """The best chain for each limit of the grid: dp[devices used by later stages][limit, later stages, first layer]."""
    count, later = search.model.count, min(sum(sizes), search.model.count)
    if search.limits.stages is not None:
        later = min(later, search.limits.stages)
    send_s = _send_s(search, settings, options)
    every = np.unique(np.concatenate([(o.seconds + send_s)[np.isfinite(o.seconds)] for o in options]))
    low = min(float(o.seconds[0, count]) for o in options) / max(1, len(options))
    whole = [float(o.seconds[0, count]) for o in options if o.fits[0, 0, count]]
    high = min(whole) if whole else float(every[-1])
    speed = _ideal_s(search, sizes, options, count)
    low = max(low, speed)
    grid = np.geomspace(low, max(high, low * 1.01) * 1.0001, GRID)
    # Only seconds that some stage has can be the slowest stage's.
    grid = np.unique(every[np.minimum(np.searchsorted(every, grid), len(every) - 1)])
    limits = len(grid)
    dp = {used: np.full((limits, later + 1, count + 1), np.inf) for used in states}
    none = states[0]
    dp[none][:, 0, count] = 0.0
    order = sorted(states, key=sum)
    by_use: dict[tuple[int, ...], list[_Option]] = {}
    for option in options:
        by_use.setdefault(option.used, []).append(option)
    came: dict[tuple[int, ...], np.ndarray] = {
        used: np.full((limits, later + 1, count + 1), -1, dtype=np.int64) for used in states
    }
    log: list[tuple[tuple[int, ...], _Option]] = []
    for used in order:
        if used == none:
            continue
        for own, own_options in by_use.items():
            rest = tuple(a - b for a, b in zip(used, own))
            if min(rest) < 0:
                continue
            before = dp[rest]
            if not np.isfinite(before[-1]).any():
                continue
            for option in own_options:
                number = len(log)
                log.append((rest, option))
                total = option.seconds + send_s
                for stages_after in range(later):
                    reach = before[:, stages_after, :]
                    if not np.isfinite(reach[-1]).any():
                        continue
                    allowed = np.where(option.fits[min(stages_after, len(option.fits) - 1)], total, np.inf)
                    if stages_after == 0:
                        allowed = np.where(option.fits[0], option.seconds, np.inf)
                    masked = np.where(allowed[None] <= grid[:, None, None], allowed[None], np.inf)
                    sums = masked + reach[:, None, :]
                    highs = sums.argmin(axis=2)
                    found = np.take_along_axis(sums, highs[:, :, None], axis=2)[:, :, 0]
                    target, back = dp[used][:, stages_after + 1, :], came[used][:, stages_after + 1, :]
                    better = found < target
                    target[better] = found[better]
                    back[better] = (number * (count + 1) + highs)[better]
    result: dict[Spread, float] = {}
    for used in states:
        for stages in range(1, later + 1):
            if search.limits.stages not in (None, stages):
                continue
            sums = dp[used][:, stages, 0]
            for at in range(limits):
                if np.isfinite(sums[at]):
                    spread, slowest, after = _chain(settings, log, came, used, stages, at, count, send_s)
                    seconds = float(sums[at]) + (settings.micro_batches - 1) * slowest + after
                    if seconds < result.get(spread, np.inf):
                        result[spread] = seconds
    best = sorted(((seconds, spread) for spread, seconds in result.items()), key=lambda e: e[0])
    return best[:60]


def _ideal_s(search: Search, sizes: tuple[int, ...], options: list[_Option], count: int) -> float:
    """Seconds of a micro-batch if all devices shared it without loss: no slowest stage is faster."""
    speed = 0.0
    for pool, devices in enumerate(sizes):
        alone = [1.0 / (o.seconds[0, count] * sum(o.used)) for o in options if o.used[pool] == sum(o.used) > 0]
        speed += devices * max(alone, default=0.0)
    return 0.5 / speed if speed else 0.0


def _send_s(search: Search, settings: Spread, options: list[_Option]) -> float:
    """About what a stage's sends take, there and back."""
    cut = max(1, search.model.count // 2)
    part = min((p for o in options for p in o.parts), key=lambda p: p.rows)
    path = search.machines.send_path(part.pool, part.pool, 1)
    return 2 * search.model.send_s(cut, part.tensor, part.rows, settings.sequence_parallel, path)


def _chain(
    settings: Spread,
    log: list[tuple[tuple[int, ...], _Option]],
    came: dict[tuple[int, ...], np.ndarray],
    used: tuple[int, ...],
    stages: int,
    at: int,
    count: int,
    send_s: float,
) -> tuple[Spread, float, float]:
    low, slowest, after = 0, 0.0, 0.0
    found = []
    for left in range(stages, 0, -1):
        code = int(came[used][at, left, low])
        number, high = divmod(code, count + 1)
        used, option = log[number][0], log[number][1]
        found.append(Stage(((low, high),), option.parts))
        slowest = max(slowest, float(option.seconds[low, high]) + (send_s if stages > 1 else 0.0))
        after = max(after, float(option.after_s[low, high]))
        low = high
    s = settings
    return msgspec.structs.replace(s, stages=tuple(found)), slowest, after
