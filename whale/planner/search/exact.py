"""For few devices: every assignment of device groups to stages, by dynamic programming.

State: the devices that later stages use, the pool of the first of them (which says what sends to it take), the first
layer of what they hold, and how many stages they are (which says how many micro-batches a stage before them holds in
memory). For a limit on the slowest stage the program finds the smallest sum of the stages' seconds; a step takes about
sum + (micro-batches - 1) x slowest. All limits of a grid are solved at once, as an axis of the arrays; then the best
few chains are simulated.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cost_model.described.layer_costs import LayerCosts, costs_of
from cost_model.described.memory import part_memory
from cost_model.described.spread import Part, Recompute, Spread, Stage
from cost_model.described.stage_costs import reduction_s
from whale.planner.described.estimate import divisors
from whale.planner.described.shares import shares, variants

if TYPE_CHECKING:
    from whale.planner.search.search import Search

GRID = 24  # limits on the slowest stage, at most
WORK = 60_000  # pairs of (devices of a stage, devices of later ones) x numbers of later stages, at most


@dataclass(frozen=True, slots=True)
class _Option:
    """One stage's ranks; matrices are [low, high], of layers low..high-1.

    Attributes:
        used: devices of each pool.
        recompute: what the stage computes again.
        forward_s, seconds: of a micro-batch's forward pass, and of both passes, without sends.
        reduce_s: after the last micro-batch.
        live: most micro-batches that the memory holds; 0: none.
        send_s: [head, cut] to a stage on the other side of a cut, by the pool of that stage (the last: several pools).
        head: number of this stage's pool in the arrays.
    """

    used: tuple[int, ...]
    parts: tuple[Part, ...]
    recompute: Recompute
    forward_s: np.ndarray
    seconds: np.ndarray
    reduce_s: np.ndarray
    live: np.ndarray
    send_s: np.ndarray
    head: int


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
    reductions: dict[tuple[Part, ...], np.ndarray] = {}
    for micro_batches in reversed(divisors(search.batch)):
        if search.limits.micro_batches not in (None, micro_batches):
            continue
        for parallel in sorted({parallel for _, parallel in search.recomputes()}):
            if search.late(0.9):
                break
            ways = [search.settings(micro_batches, (way, parallel)) for way in search.ways(parallel)]
            options = _undominated_of_each([o for s in ways for o in _options(search, states, s, reductions)])
            search.choices[micro_batches, parallel] = list(dict.fromkeys((o.used, o.parts) for o in options))
            if options:
                found += _solve(search, sizes, states, ways[0], options)
    found.sort(key=lambda e: e[0])
    for seconds, spread in found[:200]:
        if found and seconds > 1.25 * found[0][0]:
            return
        yield spread


def _options(
    search: Search, states: list[tuple[int, ...]], settings: Spread, reductions: dict[tuple[Part, ...], np.ndarray]
) -> list[_Option]:
    """What a stage may lie on: any devices, with one tensor degree per pool, rows by speed."""
    rows = search.batch // settings.micro_batches
    how = (settings.recompute, settings.sequence_parallel)
    pools, kept = search.machines.pools, _Options(search, settings, reductions)
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
        result += _undominated([kept.option(used, parts) for parts in best])
    return result


class _Options:
    """Options for one number of micro-batches and way of recompute; what several of them have in common is kept."""

    def __init__(self, search: Search, settings: Spread, reductions: dict[tuple[Part, ...], np.ndarray]) -> None:
        self.search, self.settings, self.reductions = search, settings, reductions
        self.stages = min(search.machines.devices, search.model.count)
        self.lives: dict[tuple[int, int, int, int], np.ndarray] = {}
        self.sends: dict[tuple[int, int, int, int], np.ndarray] = {}

    def option(self, used: tuple[int, ...], parts: tuple[Part, ...]) -> _Option:
        replicas = sum(p.replicas for p in parts)
        costs = [costs_of(self.search.model, self.settings, part, self.search.ranks, replicas) for part in parts]
        ahead, back = (
            np.max([_passes_s(c, values(c), host(c)) for c in costs], axis=0)
            for values, host in (
                (lambda c: c.forward_s, lambda c: c.forward_host_s),
                (lambda c: c.backward_s, lambda c: c.backward_host_s),
            )
        )
        return _Option(
            used,
            parts,
            self.settings.recompute,
            ahead,
            ahead + back,
            self._reduction_s(parts, costs),
            np.min([self._live(part, one, replicas) for part, one in zip(parts, costs)], axis=0),
            np.max([self._send_s(part, sum(p.ranks for p in parts)) for part in parts], axis=0),
            parts[0].pool if len({p.pool for p in parts}) == 1 else len(self.search.machines.pools),
        )

    def _reduction_s(self, parts: tuple[Part, ...], costs: list[LayerCosts]) -> np.ndarray:
        """Depends on the replicas of each pool, not on their rows."""
        count, key = self.search.model.count, tuple(msgspec.structs.replace(p, rows=0) for p in parts)
        if key not in self.reductions:
            found = self.reductions[key] = np.zeros((count + 1, count + 1))
            if sum(p.replicas for p in parts) > 1:
                for low, high in itertools.combinations(range(count + 1), 2):
                    own = [c.parameters_of(((low, high),)) for c in costs]
                    found[low, high] = reduction_s(
                        self.search.model, self.search.machines, parts, own, self.settings.zero
                    )
        return self.reductions[key]

    def _live(self, part: Part, one: LayerCosts, replicas: int) -> np.ndarray:
        """How many micro-batches a part's memory holds, up to as many as there can be stages."""
        count, s, key = self.search.model.count, self.settings, (part.pool, part.tensor, part.rows, replicas)
        if key not in self.lives:
            found = self.lives[key] = np.zeros((count + 1, count + 1), dtype=int)
            limit_bytes = self.search.machines.pools[part.pool].memory_bytes
            groups = 2 if self.stages > 1 else 1
            most = min(self.stages, s.micro_batches)
            for low, high in itertools.combinations(range(count + 1), 2):
                used = part_memory(one, ((low, high),), part, replicas, 1, s.zero, groups, s.offload)
                each = one.held_bytes[high] - one.held_bytes[low]
                more = (limit_bytes - used.total_bytes) / max(1.0, each)
                found[low, high] = min(most, 1 + int(more)) if more >= 0 else 0
            found[found == s.micro_batches] = self.stages  # there are no more
        return self.lives[key]

    def _send_s(self, part: Part, ranks: int) -> np.ndarray:
        """Seconds of a micro-batch through each cut, to each pool, and to the slowest of them."""
        model, machines, key = self.search.model, self.search.machines, (part.pool, part.tensor, part.rows, ranks)
        if key not in self.sends:
            paths = [machines.send_path(part.pool, pool.number, ranks) for pool in machines.pools]
            found = self.sends[key] = np.zeros((len(paths) + 1, model.count + 1))
            for cut in range(1, model.count):
                how = cut, part.tensor, part.rows, self.settings.sequence_parallel
                found[:, cut] = [model.send_s(*how, path) for path in (*paths, min(paths))]
        return self.sends[key]


def _passes_s(one: LayerCosts, device_s: array[float], host_s: array[float]) -> np.ndarray:
    """Seconds of a pass of layers low..high-1, as `LayerCosts.forward` says; infinite where there are no layers."""
    device, host = np.asarray(device_s), np.asarray(host_s)
    begin_s = np.full((len(device), len(device)), one.begin_s)
    begin_s[0, -1] = 0.0
    found = np.maximum(begin_s + device[None] - device[:, None], one.begin_host_s + host[None] - host[:, None])
    found[np.tril_indices(len(device))] = np.inf
    return found


def _undominated(options: list[_Option]) -> list[_Option]:
    """Options on the same devices without those that another one is no worse than in anything."""
    kept: list[_Option] = []
    for one in sorted(options, key=lambda o: float(o.seconds[0, -1])):
        fit = one.live > 0
        if fit.any() and not any(
            (other.live >= one.live).all()
            and (other.seconds[fit] <= one.seconds[fit]).all()
            and (other.forward_s[fit] <= one.forward_s[fit]).all()
            and (other.reduce_s[fit] <= one.reduce_s[fit]).all()
            and (other.send_s <= one.send_s).all()
            for other in kept
        ):
            kept.append(one)
    return kept


def _undominated_of_each(options: list[_Option]) -> list[_Option]:
    """For each devices the options, of all ways to compute again, that no other is better than."""
    by_use: dict[tuple[int, ...], list[_Option]] = {}
    for one in options:
        by_use.setdefault(one.used, []).append(one)
    return [one for own in by_use.values() for one in _undominated(own)]


@dataclass(slots=True)
class _Chains:
    """The best chains of later stages on some devices; arrays are [head, limit, stages, first layer].

    Attributes:
        passes_s, summed_s: of one micro-batch, until its last pass, and until its gradients are summed.
        own_s: of the first of the stages, without its send to the stage before.
        came: which option the first of them is, and its last layer.
        behind: the first two as a stage on each pool sees them, once asked for.
    """

    passes_s: np.ndarray
    summed_s: np.ndarray
    own_s: np.ndarray
    came: np.ndarray
    behind: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def _grid(search: Search, sizes: tuple[int, ...], settings: Spread, options: list[_Option]) -> np.ndarray:
    """Limits on the seconds of the slowest stage that can make a step faster than the best known one."""
    count, many = search.model.count, settings.micro_batches
    whole = [float(o.seconds[0, count]) for o in options if o.live[0, count] >= 1]
    high = max(float(o.seconds[np.isfinite(o.seconds)].max()) + 2 * float(o.send_s.max()) for o in options)
    if search.fastest is not None:
        high = min(high, search.fastest[1].step_s / many)
    elif whole and many > 1:
        high = min(whole)
    if many == 1:  # the slowest stage counts once, as any other
        return np.array([high])
    low = min(_ideal_s(search, sizes, options, count), high)
    # What a step may lose by the distance of two limits is the same for each of them.
    points = min(GRID, 2 + int(np.log(high / low) / np.log(1 + 0.3 / many))) if low < high else 1
    return np.geomspace(low, high * 1.0001, points)


def _solve(
    search: Search, sizes: tuple[int, ...], states: list[tuple[int, ...]], settings: Spread, options: list[_Option]
) -> list[tuple[float, Spread]]:
    """The best chains for each limit of the grid.

    Of a chain of later stages that time is made small that one micro-batch takes until its gradients are summed.
    """
    count, later = search.model.count, min(sum(sizes), search.model.count)
    if search.limits.stages is not None:
        later = min(later, search.limits.stages)
    heads = len(sizes) + 1
    grid = _grid(search, sizes, settings, options)
    shape = heads, len(grid), later + 1, count + 1
    chains = {
        used: _Chains(np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, -1))
        for used in states
    }
    none = states[0]
    chains[none].passes_s[0, :, 0, count] = chains[none].summed_s[0, :, 0, count] = 0.0
    by_use: dict[tuple[int, ...], list[_Option]] = {}
    for option in options:
        by_use.setdefault(option.used, []).append(option)
    log: list[tuple[tuple[int, ...], int, _Option]] = []
    fits = {id(o): np.arange(later)[:, None, None] < o.live for o in options}
    for used in sorted(states, key=sum)[1:]:
        here = chains[used]
        for own, own_options in by_use.items():
            rest = tuple(a - b for a, b in zip(used, own))
            if min(rest) < 0:
                continue
            for option in own_options:
                passes_s, summed_s = _behind(chains[rest], option.head, grid, log)
                for head in np.flatnonzero(np.isfinite(passes_s[:, -1]).any(axis=(1, 2))):
                    send_s = option.send_s[head] if rest != none else 0.0
                    own_s = np.where(fits[id(option)], option.seconds + send_s, np.inf)
                    own_s = np.where(own_s <= grid[:, None, None, None], own_s, np.inf)
                    ended = own_s + passes_s[head][:, :-1, None, :]
                    ends = np.maximum(
                        ended + option.reduce_s, option.forward_s + send_s + summed_s[head][:, :-1, None, :]
                    )
                    highs = ends.argmin(axis=3)
                    at = (*np.indices(highs.shape, sparse=True), highs)
                    target = here.summed_s[option.head][:, 1:, :]
                    better = ends[at] < target
                    if not better.any():
                        continue
                    for array_s, values_s in (
                        (here.summed_s, ends[at]),
                        (here.passes_s, ended[at]),
                        (here.own_s, own_s[at]),
                        (here.came, len(log) * (count + 1) + highs),
                    ):
                        array_s[option.head][:, 1:, :][better] = values_s[better]
                    log.append((rest, int(head), option))
    result: dict[Spread, float] = {}
    for used in states[1:]:
        ends = chains[used].summed_s[:, :, :, 0]
        for head, at, stages in zip(*np.nonzero(np.isfinite(ends))):
            if search.limits.stages not in (None, stages):
                continue
            spread, slowest = _chain(settings, log, chains, (used, int(head)), int(stages), int(at), count)
            seconds = float(ends[head, at, stages]) + (settings.micro_batches - 1) * slowest
            if seconds < result.get(spread, np.inf):
                result[spread] = seconds
    best = sorted(((seconds, spread) for spread, seconds in result.items()), key=lambda e: e[0])
    return best[:60]


def _behind(
    chains: _Chains, head: int, grid: np.ndarray, log: list[tuple[tuple[int, ...], int, _Option]]
) -> tuple[np.ndarray, np.ndarray]:
    """A chain's seconds (passes, summed) behind a stage on such a pool, to which its first stage sends."""
    if head not in chains.behind:
        count = chains.came.shape[3] - 1
        back_s = np.zeros(chains.came.shape)
        some = chains.came >= 0
        numbers = chains.came[some] // (count + 1)
        cuts = np.broadcast_to(np.arange(count + 1), some.shape)[some]
        back_s[some] = [log[number][2].send_s[head, cut] for number, cut in zip(numbers, cuts)]
        late = some & (chains.own_s + back_s > grid[None, :, None, None])
        passes_s, summed_s = (np.where(late, np.inf, v + back_s) for v in (chains.passes_s, chains.summed_s))
        chains.behind[head] = passes_s, summed_s
    return chains.behind[head]


def _ideal_s(search: Search, sizes: tuple[int, ...], options: list[_Option], count: int) -> float:
    """Seconds of a micro-batch if all devices shared it without loss: no slowest stage is faster."""
    speed = 0.0
    for pool, devices in enumerate(sizes):
        alone = [1.0 / (o.seconds[0, count] * sum(o.used)) for o in options if o.used[pool] == sum(o.used) > 0]
        speed += devices * max(alone, default=0.0)
    return 0.5 / speed if speed else 0.0


def _chain(
    settings: Spread,
    log: list[tuple[tuple[int, ...], int, _Option]],
    chains: dict[tuple[int, ...], _Chains],
    begin: tuple[tuple[int, ...], int],
    stages: int,
    at: int,
    count: int,
) -> tuple[Spread, float]:
    """The stages from the first on, and the slowest one's seconds of a micro-batch."""
    (used, head), low, slowest = begin, 0, 0.0
    found: list[Stage] = []
    again: list[Recompute] = []
    before = None
    for left in range(stages, 0, -1):
        place = head, at, left, low
        own_s = float(chains[used].own_s[place])
        number, high = divmod(int(chains[used].came[place]), count + 1)
        used, head, option = log[number]
        slowest = max(slowest, own_s + (float(option.send_s[before, low]) if before is not None else 0.0))
        found.append(Stage(((low, high),), option.parts))
        again.append(option.recompute)
        low, before = high, option.head
    return msgspec.structs.replace(settings, stages=tuple(found)).recomputing(again), slowest
