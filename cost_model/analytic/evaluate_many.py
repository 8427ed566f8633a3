"""Evaluates many strategies at once: interleaved schedules of the same shape are simulated together with NumPy.

A search changes layers and recomputation of a strategy more often than its number of stages, chunks and micro-batches.
Strategies with equal numbers run the same passes in the same order and differ only in how long each pass takes, so one
array operation computes a pass for all of them.

Decision: 0188.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stage_cache import StageCosts
from cost_model.analytic.stage_costs import fully_sharded
from cost_model.cluster.pools import Machines
from cost_model.simulator import SAME, STEADY_GROUPS, interleaved_ends_s
from whale.ir.strategy import ParallelStrategy

LEAST = 4  # fewer strategies of one shape are simulated one by one
MOST_PASSES = 200_000  # longer schedules are simulated one by one: an `_Order` holds all passes
MOST_NUMBERS = 4_000_000  # passes x strategies of one simulation, which bounds its memory


def evaluate_many(
    model: Model, machines: Machines, strategies: Sequence[ParallelStrategy], stage_costs: StageCosts
) -> list[Evaluation]:
    """Evaluates several strategies; returns for each what `evaluate` returns, up to rounding, in less time."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for number, one in enumerate(strategies):
        if one.schedule == "1f1b" and one.chunks > 1 and not fully_sharded(model, one):
            shapes.setdefault((len(one.stages), one.chunks, one.micro_batches), []).append(number)
    ends: dict[int, list[float]] = {}
    for shape, numbers in shapes.items():
        if len(numbers) >= LEAST:
            ends.update(zip(numbers, _ends_of(shape, [strategies[i] for i in numbers], stage_costs)))
    return [evaluate(model, machines, one, stage_costs, ends.get(i)) for i, one in enumerate(strategies)]


def _ends_of(
    shape: tuple[int, int, int], strategies: Sequence[ParallelStrategy], stage_costs: StageCosts
) -> list[list[float]]:
    *_, micro_batches = shape
    ahead, back = [], []
    for one in strategies:
        costs = stage_costs.list_costs(one)
        ahead.append([cost.forward_s for cost in costs])
        back.append([cost.backward_s for cost in costs])
    return interleaved_ends_many_s(ahead, back, micro_batches)


def interleaved_ends_many_s(
    forward_s: Sequence[Sequence[Sequence[float]]], backward_s: Sequence[Sequence[Sequence[float]]], micro_batches: int
) -> list[list[float]]:
    """Computes `interleaved_ends_s` of several strategies with equal numbers of stages and chunks at once.

    Args:
        forward_s, backward_s: seconds of one micro-batch, indexed [strategy][stage][chunk].

    Returns:
        For each strategy, the seconds at which each stage's last pass ends.
    """
    stages, chunks = len(forward_s[0]), len(forward_s[0][0])
    groups = max(1, micro_batches // stages)
    played, few = micro_batches, groups
    if micro_batches % groups == 0 and groups > STEADY_GROUPS:
        played, few = micro_batches // groups * STEADY_GROUPS, STEADY_GROUPS
    if 2 * stages * chunks * played > MOST_PASSES:
        return [interleaved_ends_s(a, b, micro_batches) for a, b in zip(forward_s, backward_s)]
    order = _make_order(stages, chunks, played, few)
    # [direction, stage, chunk] of each strategy as a column.
    each_s = np.stack([np.asarray(forward_s), np.asarray(backward_s)], 1).reshape(len(forward_s), -1).T
    at_once = max(1, MOST_NUMBERS // len(order.kinds))
    found: list[list[float]] = []
    for first in range(0, each_s.shape[1], at_once):
        times_s = order.play(each_s[:, first : first + at_once])
        ends_s = times_s[order.ends]
        if few == groups:
            found += ends_s.T.tolist()
            continue
        moved_s = times_s[order.later] - times_s[order.earlier]
        steady = np.ptp(moved_s, axis=0) <= SAME * few * ends_s[0]
        whole_s = ends_s + (groups - few) * moved_s[0]
        found += [
            own.tolist()
            if steady[i]
            else interleaved_ends_s(forward_s[first + i], backward_s[first + i], micro_batches)
            for i, own in enumerate(whole_s.T)
        ]
    return found


@dataclass(frozen=True, slots=True)
class _Order:
    """Holds the passes of an interleaved schedule in an order in which each comes after the two passes that it waits
    for.

    A pass is the forward or backward pass of one chunk over one micro-batch; passes are numbered in this order.
    `_make_order` creates it, `play` computes with it.

    Attributes:
        kinds: [passes] kind of each pass: the row of (direction, stage, chunk) in the table of seconds that `play`
            takes.
        waits: [2, passes] numbers of the two passes that each pass waits for: the one before it on its stage, and the
            one on another stage that sends to it. Where there is none, the total number of passes stands, whose row of
            times is 0.
        levels: the passes are cut into runs within which no pass waits for another, so that a run is one array
            operation; these are the ends (exclusive) of the runs.
        ends: number of each stage's last pass.
        earlier, later: numbers of the passes of a group of micro-batches in the middle of the step, and of the same
            passes in the next group. If all pairs are equally far apart in time, the schedule is in a steady state, and
            further groups need no simulation.
    """

    kinds: np.ndarray
    waits: np.ndarray
    levels: list[int]
    ends: np.ndarray
    earlier: np.ndarray
    later: np.ndarray

    def play(self, each_s: np.ndarray) -> np.ndarray:
        """Simulates the schedule for several strategies; returns the seconds at which each pass ends.

        Args:
            each_s: [kinds, strategies] seconds of a pass of each kind.

        Returns:
            [passes + 1, strategies]; the last row is 0, for passes that wait for nothing.
        """
        times_s = np.zeros((len(self.kinds) + 1, each_s.shape[1]))
        times_s[:-1] = each_s[self.kinds]
        first = 0
        for end in self.levels:
            before, sent = self.waits[:, first:end]
            times_s[first:end] += np.maximum(times_s[before], times_s[sent])
            first = end
        return times_s


@lru_cache(maxsize=32)
def _make_order(stages: int, chunks: int, micro_batches: int, groups: int) -> _Order:
    """Sorts the passes of `schedule_interleaved` by the length of the longest chain of passes before each."""
    sizes = [(micro_batches + groups - 1 - i) // groups for i in range(groups)]
    firsts = [sum(sizes[:i]) for i in range(groups)]
    ahead = [(c, m) for first, size in zip(firsts, sizes) for c in range(chunks) for m in range(first, first + size)]
    total, parts = len(ahead), stages * chunks
    half = parts * micro_batches  # passes of one direction; a pass's name: direction x half + part x micro-batches + m
    level, before, sent = [-1] * (2 * half), [-1] * (2 * half), [-1] * (2 * half)
    programs = []
    for stage in range(stages):
        warm = total if groups == 1 else min(total, 2 * (stages - 1 - stage) + (chunks - 1) * sizes[0])
        own: list[int] = []
        for place in range(2 * total):
            over = place - warm
            if over < 0 or (over % 2 == 0 and warm + over // 2 < total):
                chunk, m = ahead[place if over < 0 else warm + over // 2]
                name = (chunk * stages + stage) * micro_batches + m
                sent[name] = name - micro_batches if chunk * stages + stage else -1
            else:
                chunk, m = ahead[over // 2 if over // 2 < total - warm else place - total]
                part = (chunks - 1 - chunk) * stages + stage
                name = half + part * micro_batches + m
                sent[name] = name - half if part == parts - 1 else name + micro_batches
            before[name] = own[-1] if own else -1
            own.append(name)
        programs.append(own)
    places, runnable, waiting = [0] * stages, list(range(stages)), [True] * stages
    while runnable:
        stage = runnable.pop()
        waiting[stage] = False
        place, own = places[stage], programs[stage]
        while place < len(own) and (sent[own[place]] < 0 or level[sent[own[place]]] >= 0):
            name = own[place]
            level[name] = 1 + max(level[before[name]] if place else -1, level[sent[name]] if sent[name] >= 0 else -1)
            place += 1
        if place > places[stage]:
            places[stage] = place
            for other in ((stage + 1) % stages, (stage - 1) % stages):
                if not waiting[other] and other != stage:
                    waiting[other] = True
                    runnable.append(other)
    rank = np.argsort(np.asarray(level), kind="stable")  # names in order
    at = np.empty(2 * half + 1, dtype=np.int64)  # names -> positions
    at[rank], at[-1] = np.arange(2 * half), 2 * half
    part_of = rank % half // micro_batches
    kinds = rank // half * parts + part_of % stages * chunks + part_of // stages
    levels = np.asarray(level)[rank]
    runs = [*(np.nonzero(np.diff(levels))[0] + 1).tolist(), 2 * half]
    middle, some = groups // 2, range(2 * parts)
    earlier, later = [], []
    for start in range(middle - 1, middle + 1) if groups >= STEADY_GROUPS else ():
        for direction_part in some:
            for i in range(sizes[0]):
                earlier.append(direction_part * micro_batches + firsts[start] + i)
                later.append(direction_part * micro_batches + firsts[start + 1] + i)
    return _Order(
        kinds=kinds,
        waits=np.stack([at[np.asarray(before)[rank]], at[np.asarray(sent)[rank]]]),
        levels=runs,
        ends=at[np.asarray([own[-1] for own in programs])],
        earlier=at[np.asarray(earlier, dtype=np.int64)],
        later=at[np.asarray(later, dtype=np.int64)],
    )
