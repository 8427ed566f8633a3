"""Partitions a chain of layers into stages on given ranks so that all fit and the slowest stage is as fast as possible.

If a stage may use several kinds of recompute, the partition takes whichever lets the stage hold the most layers within
the time limit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from cost_model.analytic.layer_costs import LayerCosts, Model, costs_of, slowest_passes_s
from cost_model.analytic.stage_costs import lacking_bytes, stage_memory
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, Stage, count_live_chunks

# The slowest stage's seconds are found by bisection: most steps, and relative width of the interval to stop at.
HALVINGS, PRECISION = 24, 2e-4
FIRST_STEP = 0.3  # the first limit of the bisection lies below the known seconds by this part


class Room:
    """Computes how many layers fit into the memory of a stage, and caches the answers: most strategies share their
    stages.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.looked = 0  # how often memory was computed, instead of found in the cache
        self._most: dict[tuple[object, ...], int] = {}
        self._likely: dict[tuple[object, ...], int] = {}  # how many layers fitted at last
        self._kinds: dict[tuple[object, ...], int] = {}

    def number(self, settings: ParallelStrategy, kind: tuple[DeviceGroup, ...], many: bool) -> int:
        """Returns an integer that identifies a kind of stage in the cache: stages with equal numbers need equal memory.

        Args:
            settings: the strategy's settings; those that memory depends on (ZeRO, offload, ...) are part of the kind.
            kind: device groups of the stage.
            many: the pipeline has more than one stage.
        """
        key = settings.zero, settings.offload, settings.sequence_parallel, settings.expert_ranks, kind, many
        return self._kinds.setdefault(key, len(self._kinds))

    def most(self, number: int, settings: ParallelStrategy, kind: tuple[DeviceGroup, ...],
             costs: Sequence[LayerCosts], how: Recompute, live: int, low: int, many: bool) -> int:  # fmt: skip
        """Returns the end (exclusive) of the longest range of layers from `low` on that fits; `low` itself: not one
        layer fits.

        Args:
            number: identifies the kind of stage, from `number`.
            kind: device groups of the stage.
            costs: layer costs on each of these groups, with recompute `how`.
            live: micro-batches whose activations the stage holds at its peak.
            many: the pipeline has more than one stage.
        """
        key = number, how, live, low
        if (known := self._most.get(key)) is None:
            fit, full = low, costs[0].count + 1
            # As many layers as fit from elsewhere on, and one more; else all remaining ones, which often fit.
            likely = self._likely.get((number, how, live), full)
            tried = [end for end in (low + likely, low + likely + 1) if end < full] or [full - 1]
            while full - fit > 1:
                middle = tried.pop(0) if tried else (fit + full) // 2
                if not fit < middle < full:
                    continue
                self.looked += 1
                one = Stage(((low, middle),), kind)
                memory = stage_memory(settings, one, costs, live, 1 + many)
                if lacking_bytes(self.machines, settings, one, costs, memory) <= 0:
                    fit = middle
                else:
                    full = middle
            known = self._most[key] = fit
            if fit < costs[0].count:
                self._likely[number, how, live] = fit - low
        return known


class Chain:
    """Assigns a model's layers to a given sequence of stages, within a time limit per stage and the stages' memory."""

    def __init__(
        self,
        model: Model,
        kinds: Sequence[tuple[DeviceGroup, ...]],
        settings: ParallelStrategy,
        ranks: int,
        room: Room,
        recomputes: Sequence[Recompute] = (),
    ) -> None:
        """Computes the layers' costs on the ranks of each stage.

        Args:
            kinds: the device groups of each stage, in pipeline order.
            settings: the strategy's settings; its stages are ignored.
            ranks: number of ranks of the job, for the costs.
            room: cache of how many layers fit.
            recomputes: the kinds of recompute that a stage may use (empty: the one in `settings`).
        """
        self.model, self.settings, self.room, self.stages = model, settings, room, len(kinds)
        recomputes = tuple(recomputes) or (settings.recompute,)
        many = self.stages > 1
        of = {
            kind: (
                room.number(settings, kind, many),
                [
                    (how, [costs_of(model, settings, p, ranks, sum(q.replicas for q in kind), how) for p in kind])
                    for how in recomputes
                ],
            )
            for kind in dict.fromkeys(kinds)
        }
        self.kinds = [(kind, *of[kind]) for kind in kinds]
        # The number of micro-batches whose activations each stage keeps at its peak.
        self.live = [
            count_live_chunks(settings.schedule, self.stages, 1, settings.micro_batches, stage)
            for stage in range(self.stages)
        ]

    def _able(self, stage: int, low: int) -> list[tuple[Sequence[LayerCosts], int]]:
        """Returns (layer costs, end of the longest range from `low` on that fits) for each recompute with which a layer
        fits.
        """
        kind, number, each = self.kinds[stage]
        live, many = self.live[stage], self.stages > 1
        return [
            (costs, most)
            for how, costs in each
            if (most := self.room.most(number, self.settings, kind, costs, how, live, low, many)) > low
        ]

    def cut_within(self, limit_s: float) -> list[int] | None:
        """Returns the end layer of each stage such that no stage takes more than `limit_s` for a micro-batch; None:
        impossible.

        Greedy: each stage takes as many layers as its memory and the limit allow, and leaves one for each later stage.
        """
        ends, low, count = [], 0, self.model.count
        taken = max(1, count // self.stages)
        for stage in range(self.stages):
            left = count - (self.stages - 1 - stage)  # every later stage needs a layer
            high = low
            for costs, most in self._able(stage, low):
                most = min(most, left)
                if most > high and slowest_passes_s(costs, low, high + 1) <= limit_s:
                    at = max(high + 1, min(most, low + taken))
                    if slowest_passes_s(costs, low, at) <= limit_s:
                        while at < most and slowest_passes_s(costs, low, at + 1) <= limit_s:
                            at += 1
                    else:
                        at -= 1
                        while slowest_passes_s(costs, low, at) > limit_s:
                            at -= 1
                    high = at
            if high == low:
                return None
            ends.append(high)
            taken, low = high - low, high
        return ends if low == count else None

    def best(self, below_s: float = math.inf) -> list[int] | None:
        """Returns the partition whose slowest stage is the fastest, as the end layer (exclusive) of each stage.

        None: no partition fits into memory, or the slowest stage takes more than `below_s`.
        """
        if self.stages > self.model.count:
            return None
        ends = self.cut_within(below_s)
        if ends is None or self.stages == 1:
            return ends
        high, low = self.slowest(ends), 0.0
        for _ in range(HALVINGS):
            if high - low <= PRECISION * high:
                break
            middle = (low + high) / 2 if low else (1 - FIRST_STEP) * high
            found = self.cut_within(middle)
            if found is None:
                low = middle
            else:
                ends, high = found, self.slowest(found)
        return ends

    def slowest(self, ends: list[int]) -> float:
        """Returns the seconds of the slowest stage of a partition, each stage with the fastest recompute that fits."""
        return max(
            min(slowest_passes_s(costs, low, high) for costs, most in self._able(stage, low) if most >= high)
            for stage, (low, high) in enumerate(zip([0, *ends[:-1]], ends))
        )

    def strategy(self, ends: list[int]) -> ParallelStrategy:
        """Returns the strategy with stages that end (exclusive) at the layers `ends`."""
        lows = [0, *ends[:-1]]
        stages = tuple(Stage(((low, high),), kind) for (kind, _, _), low, high in zip(self.kinds, lows, ends))
        return msgspec.structs.replace(self.settings, stages=stages)


def balance_layers(count: int, each_s: Sequence[float], more_s: Sequence[float], least: int) -> list[int]:
    """Divides `count` equal layers over stages so that the slowest stage takes as little time as possible.

    Args:
        each_s: seconds of a layer on each stage.
        more_s: seconds of what each stage does besides layers.
        least: layers that each stage has at least; `count` is no less than that for all of them.

    Returns:
        The layers of each stage.
    """
    # The seconds of every stage, if layers could be divided into fractions.
    even_s = (count + sum([more / each for more, each in zip(more_s, each_s)])) / sum([1 / each for each in each_s])
    layers = [max(least, int((even_s - more) / each)) for more, each in zip(more_s, each_s)]
    if (left := count - sum(layers)) > 0:
        after = [(more_s[i] + (n + 1) * each_s[i], i) for i, n in enumerate(layers)]
        heapq.heapify(after)
        for _ in range(left):
            seconds, i = after[0]
            layers[i] += 1
            heapq.heapreplace(after, (seconds + each_s[i], i))
    elif left < 0:
        slowest = [(-more_s[i] - n * each_s[i], i) for i, n in enumerate(layers) if n > least]
        heapq.heapify(slowest)
        for _ in range(-left):
            seconds, i = heapq.heappop(slowest)
            layers[i] -= 1
            if layers[i] > least:
                heapq.heappush(slowest, (seconds + each_s[i], i))
    return layers
