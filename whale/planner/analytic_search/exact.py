"""Finds the best assignment of device groups to stages by dynamic programming, where there are few devices.

State: the devices that later stages use, the pool of the first of these stages (which determines the seconds of sends
to it), its first layer, and the number of later stages (which determines how many micro-batches a stage before them
keeps in memory). For a limit on the slowest stage the program finds the smallest sum of the stages' seconds; a step
takes about sum + (micro-batches - 1) x slowest. All limits of a grid are solved at once, as an axis of the arrays; then
the best few chains are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, Stage
from whale.planner.analytic_search.estimate import Estimates, divisors
from whale.planner.analytic_search.neighbours import StageRanks
from whale.planner.analytic_search.stage_options import StageOption, drop_dominated, stage_options
from whale.planner.analytic_search.work import ELEMENT_S, Work

GRID = 24  # limits on the slowest stage, at most
# Limits lie so close that a step loses at most this part of itself by the distance of two.
GRID_LOSS = 0.3
WORK = 60_000  # pairs of (devices of a stage, devices of later ones) x numbers of later stages, at most
ELEMENTS = 20_000_000  # limits x numbers of later stages x ranges of layers, at most: what one array of them holds
CHAINS = 60  # that are handed on, of each number of micro-batches, and...
HANDED_ON = 200  # ...of all together, as long as they are at most...
AT_ONCE = 4  # of each number of micro-batches, before others are looked at
BEHIND = 1.25  # ...so many times as long as the best, by this program


def exact(
    search: Estimates, fastest_s: float | None, choices: dict[tuple[int, bool], list[StageRanks]]
) -> Iterator[ParallelStrategy]:
    """Yields the best strategies for every number of micro-batches, without interleaving; best first.

    Args:
        fastest_s: seconds of the best known step; None: none is known.
        choices: filled with the options of a stage, by (micro-batches, sequence parallel).
    """
    sizes = tuple(pool.devices for pool in search.machines.pools)
    pairs = 1
    for n in sizes:
        pairs *= (n + 1) * (n + 2) // 2
    stages = min(sum(sizes), search.model.count)
    if pairs * stages > WORK or GRID * stages * (search.model.count + 1) ** 2 > ELEMENTS:
        return
    states = list(itertools.product(*(range(n + 1) for n in sizes)))
    found: list[tuple[float, ParallelStrategy]] = []
    reductions: dict[tuple[DeviceGroup, ...], np.ndarray] = {}
    for micro_batches in reversed(divisors(search.batch)):
        if search.limits.micro_batches not in (None, micro_batches):
            continue
        for parallel in sorted({parallel for _, parallel in search.recomputes()}):
            kinds = [search.settings(micro_batches, (kind, parallel)) for kind in search.recompute_kinds(parallel)]
            options = drop_dominated([o for s in kinds for o in stage_options(search, states, s, reductions)])
            choices[micro_batches, parallel] = list(dict.fromkeys((o.used, o.parts) for o in options))
            if options:
                grid = _grid(search.model.count, sizes, micro_batches, options, fastest_s)
                solver = _Solver(kinds[0], states, options, grid, search.model.count, search.limits.stages)
                some = solver.best(search.work)
                yield from (strategy for _, strategy in some[:AT_ONCE])
                found += some
    found.sort(key=lambda e: e[0])
    for seconds, strategy in found[:HANDED_ON]:
        if seconds > BEHIND * found[0][0]:
            return
        yield strategy


def _grid(
    count: int, sizes: tuple[int, ...], micro_batches: int, options: list[StageOption], fastest_s: float | None
) -> np.ndarray:
    """Returns limits on the slowest stage's seconds that can give a step faster than the best known one."""
    whole = [float(o.seconds[0, count]) for o in options if o.live[0, count] >= 1]
    high = max(float(o.seconds[np.isfinite(o.seconds)].max()) + 2 * float(o.send_s.max()) for o in options)
    if fastest_s is not None:
        high = min(high, fastest_s / micro_batches)
    elif whole and micro_batches > 1:
        high = min(whole)
    if micro_batches == 1:  # the slowest stage counts once, as any other
        return np.array([high])
    low = min(_ideal_s(sizes, options, count), high)
    # The limits lie at equal ratios, so that a step may lose the same part of itself between any two neighbours.
    points = min(GRID, 2 + int(np.log(high / low) / np.log(1 + GRID_LOSS / micro_batches))) if low < high else 1
    return np.geomspace(low, high * 1.0001, points)  # the largest limit itself is allowed, whatever it is rounded to


def _ideal_s(sizes: tuple[int, ...], options: list[StageOption], count: int) -> float:
    """Returns half of an ideal micro-batch's seconds, shared by all devices without loss: no slowest stage is faster.

    If no pool has options of its own (replicas on several pools are required): the seconds of the smallest stage.
    """
    speed = 0.0
    for pool, devices in enumerate(sizes):
        alone = [1.0 / (o.seconds[0, count] * sum(o.used)) for o in options if o.used[pool] == sum(o.used) > 0]
        speed += devices * max(alone, default=0.0)
    return 0.5 / speed if speed else min(float(o.seconds[o.seconds > 0].min()) for o in options)


@dataclass(slots=True)
class _Chains:
    """The best chains of later stages for each set of devices; arrays are [head, limit, stages, first layer].

    Attributes:
        passes_s, summed_s: of one micro-batch, until its last pass, and until its gradients are summed.
        own_s: of the first of the stages, without its send to the stage before.
        came: the option chosen for the first stage, and its last layer.
        behind: cached seconds (passes, summed) as seen by a preceding stage on each pool.
    """

    passes_s: np.ndarray
    summed_s: np.ndarray
    own_s: np.ndarray
    came: np.ndarray
    behind: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class _Solver:
    """Finds the best chains of stages for each limit of a grid.

    Of a chain of later stages it minimises the time until one micro-batch's gradients are summed.

    Args:
        settings: the strategies' settings.
        states: sets of devices of each pool that stages may use together; the first one is empty.
        count: number of layers.
        stages: required number of stages; None: any.
    """

    def __init__(
        self,
        settings: ParallelStrategy,
        states: list[tuple[int, ...]],
        options: list[StageOption],
        grid: np.ndarray,
        count: int,
        stages: int | None,
    ) -> None:
        self.settings, self.states, self.grid, self.count, self.stages = settings, states, grid, count, stages
        later = min(max(map(sum, states)), count)
        if stages is not None:
            later = min(later, stages)
        shape = len(states[0]) + 1, len(grid), later + 1, count + 1
        self.chains = {
            used: _Chains(np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, -1))
            for used in states
        }
        none = self.chains[states[0]]
        none.passes_s[0, :, 0, count] = none.summed_s[0, :, 0, count] = 0.0
        self.by_use: dict[tuple[int, ...], list[StageOption]] = {}
        for option in options:
            self.by_use.setdefault(option.used, []).append(option)
        self.fits = {id(o): np.arange(later)[:, None, None] < o.live for o in options}
        # The stages put before chains: (devices of the chain, its head, option).
        self.log: list[tuple[tuple[int, ...], int, StageOption]] = []

    def best(self, work: Work) -> list[tuple[float, ParallelStrategy]]:
        """Returns the strategies that are found, as (seconds of a step, strategy), fastest first."""
        for used in sorted(self.states, key=sum)[1:]:
            for own, options in self.by_use.items():
                rest = tuple(a - b for a, b in zip(used, own))
                if min(rest) >= 0:
                    for option in options:
                        work.spend(ELEMENT_S * self.chains[used].came.size * (self.count + 1))
                        self._put_before(option, rest, self.chains[used])
        result: dict[ParallelStrategy, float] = {}
        for used in self.states[1:]:
            ends = self.chains[used].summed_s[:, :, :, 0]
            for head, at, stages in zip(*np.nonzero(np.isfinite(ends))):
                if self.stages not in (None, stages):
                    continue
                strategy, slowest = self._chain(used, int(head), int(stages), int(at))
                seconds = float(ends[head, at, stages]) + (self.settings.micro_batches - 1) * slowest
                if seconds < result.get(strategy, np.inf):
                    result[strategy] = seconds
        return sorted(((seconds, strategy) for strategy, seconds in result.items()), key=lambda e: e[0])[:CHAINS]

    def _put_before(self, option: StageOption, rest: tuple[int, ...], here: _Chains) -> None:
        """Puts a stage before the chains on other devices; keeps each new chain that is better than the known one."""
        grid, count = self.grid, self.count
        passes_s, summed_s = self._predict_behind(self.chains[rest], option.head)
        for head in np.flatnonzero(np.isfinite(passes_s[:, -1]).any(axis=(1, 2))):
            send_s = option.send_s[head] if any(rest) else 0.0
            own_s = np.where(self.fits[id(option)], option.seconds + send_s, np.inf)
            own_s = np.where(own_s <= grid[:, None, None, None], own_s, np.inf)
            ended = own_s + passes_s[head][:, :-1, None, :]
            ends = np.maximum(ended + option.reduce_s, option.forward_s + send_s + summed_s[head][:, :-1, None, :])
            highs = ends.argmin(axis=3)
            at = (*np.indices(highs.shape, sparse=True), highs)
            better = ends[at] < here.summed_s[option.head][:, 1:, :]
            if not better.any():
                continue
            for array_s, values_s in (
                (here.summed_s, ends[at]),
                (here.passes_s, ended[at]),
                (here.own_s, own_s[at]),
                (here.came, len(self.log) * (count + 1) + highs),
            ):
                array_s[option.head][:, 1:, :][better] = values_s[better]
            self.log.append((rest, int(head), option))

    def _predict_behind(self, chains: _Chains, head: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chains' seconds (passes, summed) behind a stage on the pool ``head``, sends to it included."""
        if head not in chains.behind:
            back_s = np.zeros(chains.came.shape)
            some = chains.came >= 0
            numbers = chains.came[some] // (self.count + 1)
            cuts = np.broadcast_to(np.arange(self.count + 1), some.shape)[some]
            back_s[some] = [self.log[number][2].send_s[head, cut] for number, cut in zip(numbers, cuts)]
            late = some & (chains.own_s + back_s > self.grid[None, :, None, None])
            passes_s, summed_s = (np.where(late, np.inf, v + back_s) for v in (chains.passes_s, chains.summed_s))
            chains.behind[head] = passes_s, summed_s
        return chains.behind[head]

    def _chain(self, used: tuple[int, ...], head: int, stages: int, at: int) -> tuple[ParallelStrategy, float]:
        """Follows a chain from its first stage on; returns the strategy and its slowest stage's seconds."""
        low, slowest = 0, 0.0
        found: list[Stage] = []
        again: list[Recompute] = []
        before = None
        for left in range(stages, 0, -1):
            place = head, at, left, low
            own_s = float(self.chains[used].own_s[place])
            number, high = divmod(int(self.chains[used].came[place]), self.count + 1)
            used, head, option = self.log[number]
            slowest = max(slowest, own_s + (float(option.send_s[before, low]) if before is not None else 0.0))
            found.append(Stage(((low, high),), option.parts))
            again.append(option.recompute)
            low, before = high, option.head
        return msgspec.structs.replace(self.settings, stages=tuple(found)).replace_recompute(again), slowest
