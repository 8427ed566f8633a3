"""Partitions a chain of layers into stages on given ranks so that all fit and the slowest stage is as fast as possible.

If a stage may recompute activations in several ways, it takes as many layers as the best of them allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cost_model.analytic.layer_costs import LayerCosts, Model, costs_of, slowest_passes_s
from cost_model.analytic.stage_costs import lacking_bytes, stage_memory
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, Stage, count_live_chunks

# The slowest stage's seconds are found by halving an interval: so often at most, or until it is so small a part.
HALVINGS, PRECISION = 24, 2e-4
FIRST_STEP = 0.3  # part of it by which the first limit lies below what is known


class Room:
    """The number of layers that fit into stages, remembered for a search: most strategies have the same stages."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.looked = 0  # questions whether layers fit that were not answered before
        self._most: dict[tuple[object, ...], int] = {}
        self._kinds: dict[tuple[object, ...], int] = {}

    def number(self, settings: ParallelStrategy, kind: tuple[DeviceGroup, ...], many: bool) -> int:
        """Returns a number for stages on such ranks, under settings on which their memory depends; `many` stages."""
        key = settings.zero, settings.offload, settings.sequence_parallel, settings.expert_ranks, kind, many
        return self._kinds.setdefault(key, len(self._kinds))

    def most(self, number: int, settings: ParallelStrategy, kind: tuple[DeviceGroup, ...],
             costs: Sequence[LayerCosts], how: Recompute, live: int, low: int, many: bool) -> int:  # fmt: skip
        """Returns the last layer + 1 of the most layers from `low` on that fit; `low`: not even one does.

        Args:
            number: of the kind, from `number`.
            costs: of its parts, recomputed as `how` says.
            live: micro-batches whose activations are kept.
        """
        key = number, how, live, low
        if (known := self._most.get(key)) is None:
            fit, full = low, costs[0].count + 1
            middle = full - 1  # all of them, which often do
            while full - fit > 1:
                self.looked += 1
                one = Stage(((low, middle),), kind)
                memory = stage_memory(settings, one, costs, live, 1 + many)
                if lacking_bytes(self.machines, settings, one, costs, memory) <= 0:
                    fit = middle
                else:
                    full = middle
                middle = (fit + full) // 2
            known = self._most[key] = fit
        return known


class Chain:
    """The ranks of the stages in order; computes how many layers a stage can take within a time limit and its
    memory.
    """

    def __init__(
        self,
        model: Model,
        kinds: Sequence[tuple[DeviceGroup, ...]],
        settings: ParallelStrategy,
        ranks: int,
        room: Room,
        recomputes: Sequence[Recompute] = (),
    ) -> None:
        """Takes the stages' ranks and the layers' costs on them.

        Args:
            kinds: the parts of each stage.
            recomputes: the kinds of recompute that a stage may use (empty: as the settings say).
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
        """Returns, for each recompute, the costs and the last layer + 1 that the stage has memory for."""
        kind, number, each = self.kinds[stage]
        live, many = self.live[stage], self.stages > 1
        return [
            (costs, most)
            for how, costs in each
            if (most := self.room.most(number, self.settings, kind, costs, how, live, low, many)) > low
        ]

    def cut_within(self, limit_s: float) -> list[int] | None:
        """Returns the stages' last layers such that no stage exceeds `limit_s`, with layers as early as possible; None:
        impossible.
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
        """Returns the partition with the fastest slowest stage, as the ends of stages.

        None: no partition fits into memory, or its slowest stage takes more than `below_s`.
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
        """Returns the seconds of the slowest of these stages, each with as little recomputation as its memory
        allows.
        """
        return max(
            min(slowest_passes_s(costs, low, high) for costs, most in self._able(stage, low) if most >= high)
            for stage, (low, high) in enumerate(zip([0, *ends[:-1]], ends))
        )

    def strategy(self, ends: list[int]) -> ParallelStrategy:
        """Returns the strategy whose stages end at these layers."""
        lows = [0, *ends[:-1]]
        stages = tuple(Stage(((low, high),), kind) for (kind, _, _), low, high in zip(self.kinds, lows, ends))
        return msgspec.structs.replace(self.settings, stages=stages)
