"""Finds the best assignment of device groups to stages by dynamic programming, for few devices.

A state of the program is a chain of last stages, described by the devices that they use, the pool of the first of them
(which determines the seconds of sends to that stage), its first layer, and the number of stages in the chain (which
determines how many micro-batches a stage before them holds in memory). Given a limit on the slowest stage, the program
finds the smallest sum of the stages' seconds; a step takes about sum + (micro-batches - 1) x slowest. All limits of a
grid are solved at once, as one axis of the arrays; then the best few chains are simulated.
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

GRID = 24  # most limits on the slowest stage's seconds
# Neighbouring limits differ so little that a step is longer by at most this part because of the grid.
GRID_LOSS = 0.3
WORK = 60_000  # most pairs of (devices of a stage, devices of later stages) x numbers of later stages
ELEMENTS = 20_000_000  # most limits x numbers of later stages x ranges of layers: the elements of one array
CHAINS = 60  # most strategies found for one number of micro-batches
HANDED_ON = 200  # most strategies yielded at the end, over all numbers of micro-batches
AT_ONCE = 4  # strategies yielded for one number of micro-batches, before the next number is solved
BEHIND = 1.25  # strategies estimated at more than this times the best one are not yielded at the end


def exact(
    search: Estimates, fastest_s: float | None, choices: dict[tuple[int, bool], list[StageRanks]]
) -> Iterator[ParallelStrategy]:
    """Yields the best strategies for every number of micro-batches, without interleaving, to be simulated by the
    search.

    The few best of each number of micro-batches come as soon as they are found; the best of all follow, fastest first.
    Nothing is yielded where there are too many devices or layers for the dynamic program.

    Args:
        search: the search, for its model, machines, constraints and estimates.
        fastest_s: seconds of the best known step; None: none is known.
        choices: filled with the options of a stage, by (micro-batches, sequence parallel), for later moves.
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
    """Returns the limits (seconds of the slowest stage, ascending) for which a step may be faster than the best known
    one.
    """
    whole = [float(o.seconds[0, count]) for o in options if o.live[0, count] >= 1]
    high = max(float(o.seconds[np.isfinite(o.seconds)].max()) + 2 * float(o.send_s.max()) for o in options)
    if fastest_s is not None:
        high = min(high, fastest_s / micro_batches)
    elif whole and micro_batches > 1:
        high = min(whole)
    if micro_batches == 1:  # a step is the sum of the stages' seconds, so that no limit on the slowest one is needed
        return np.array([high])
    low = min(_ideal_s(sizes, options, count), high)
    # The limits lie at equal ratios, so that the relative loss between any two neighbours is the same.
    points = min(GRID, 2 + int(np.log(high / low) / np.log(1 + GRID_LOSS / micro_batches))) if low < high else 1
    return np.geomspace(low, high * 1.0001, points)  # the largest limit itself is allowed, whatever it is rounded to


def _ideal_s(sizes: tuple[int, ...], options: list[StageOption], count: int) -> float:
    """Returns a lower limit of the slowest stage's seconds for a micro-batch: half of what a step without any loss
    would take.

    That ideal step divides the work of all layers over all devices, each at the best speed that any option of its pool
    has. If no option uses one pool alone (replicas on several pools are required), returns the seconds of the fastest
    stage that any option gives, whatever its layers.

    Args:
        sizes: number of devices of each pool.
        options: the options of a stage.
        count: number of layers.
    """
    speed = 0.0
    for pool, devices in enumerate(sizes):
        alone = [1.0 / (o.seconds[0, count] * sum(o.used)) for o in options if o.used[pool] == sum(o.used) > 0]
        speed += devices * max(alone, default=0.0)
    return 0.5 / speed if speed else min(float(o.seconds[o.seconds > 0].min()) for o in options)


@dataclass(slots=True)
class _Chains:
    """Holds the best chains of last stages that use one set of devices.

    The arrays are indexed [head, limit, number of stages, first layer]; head: number of the first stage's pool.

    Attributes:
        passes_s: seconds of both passes of one micro-batch through the chain; infinite: there is no such chain.
        summed_s: seconds until the gradients of that micro-batch are reduced.
        own_s: seconds of the chain's first stage, without sends to the stage before.
        came: (index into the solver's log) x (layers + 1) + the first stage's end layer; -1: there is no such chain.
        behind: cached (passes_s, summed_s) with sends to a preceding stage included, by the pool of that stage.
    """

    passes_s: np.ndarray
    summed_s: np.ndarray
    own_s: np.ndarray
    came: np.ndarray
    behind: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class _Solver:
    """Finds, for each limit on the slowest stage, the chains of stages with the fewest seconds until gradients are
    reduced.

    Args:
        settings: the strategies' settings; its stages are ignored.
        states: sets of devices that stages may use together, as device counts per pool; the first one is empty.
        options: the options of one stage.
        grid: limits on the slowest stage's seconds.
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
        # The stages that `_put_before` added: (devices of the chain behind, that chain's head, option of the stage).
        self.log: list[tuple[tuple[int, ...], int, StageOption]] = []

    def best(self, work: Work) -> list[tuple[float, ParallelStrategy]]:
        """Runs the dynamic program; returns the best strategies as (estimated seconds of a step, strategy), fastest
        first.
        """
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
        """Extends each chain on the devices `rest` by a first stage with `option`, and records the chains that are
        improvements.

        Args:
            rest: devices of the existing chains, per pool.
            here: the chains on `rest` and the option's devices, updated in place.
        """
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
        """Returns (passes_s, summed_s) of chains that follow a stage on pool ``head``, with sends to that stage
        included.
        """
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
        """Follows a chain from its first stage to its last; returns the strategy and the seconds of its slowest stage.

        Args:
            used: devices of the chain, per pool.
            head: number of the first stage's pool.
            stages: number of stages.
            at: index of the limit.
        """
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
