"""Partitions a chain of layers into stages on given ranks so that all fit and the slowest stage is as fast as possible.

If a stage may recompute activations in several ways, it takes as many layers as the best of them allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cost_model.analytic.layer_costs import LayerCosts, Model, costs_of, slowest_passes_s
from cost_model.analytic.stage_costs import lacking_bytes, stage_memory
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, Stage, count_live_chunks

# The slowest stage's seconds are found by halving an interval: so often at most, or until it is so small a part.
HALVINGS, PRECISION = 24, 2e-4


class Chain:
    """The ranks of the stages in order; computes how many layers a stage can take within a time limit and its
    memory.
    """

    def __init__(
        self,
        model: Model,
        machines: Machines,
        kinds: Sequence[tuple[DeviceGroup, ...]],
        settings: ParallelStrategy,
        ranks: int,
        recomputes: Sequence[Recompute] = (),
    ) -> None:
        """Takes the stages' ranks and the layers' costs on them.

        Args:
            kinds: the parts of each stage.
            recomputes: the kinds of recompute that a stage may use (empty: as the settings say).
        """
        self.model, self.machines, self.settings = model, machines, settings
        self.kinds, self.recomputes = kinds, tuple(recomputes) or (settings.recompute,)
        of: dict[tuple[tuple[DeviceGroup, ...], Recompute], list[LayerCosts]] = {}
        for kind in dict.fromkeys(kinds):
            replicas = sum(part.replicas for part in kind)
            for how in self.recomputes:
                of[kind, how] = [costs_of(model, settings, part, ranks, replicas, how) for part in kind]
        self.costs = of
        self.stages = len(kinds)

    def seconds(self, kind: tuple[DeviceGroup, ...], how: Recompute, low: int, high: int) -> float:
        """Returns the seconds of both passes of layers low..high-1, on the slowest part."""
        return slowest_passes_s(self.costs[kind, how], low, high)

    def live(self, stage: int) -> int:
        """Returns the number of micro-batches whose activations a stage keeps at its peak."""
        return count_live_chunks(self.settings.schedule, self.stages, 1, self.settings.micro_batches, stage)

    def fits(self, stage: int, how: Recompute, low: int, high: int) -> bool:
        """Tells whether layers low..high-1, recomputed as `how` says, fit into the memory of a stage's ranks and
        hosts.
        """
        kind = self.kinds[stage]
        one, costs = Stage(((low, high),), kind), self.costs[kind, how]
        memory = stage_memory(self.settings, one, costs, self.live(stage), self.stages)
        return lacking_bytes(self.machines, self.settings, one, costs, memory) <= 0

    def within(self, limit_s: float) -> list[int] | None:
        """Returns the stages' last layers such that no stage exceeds `limit_s`, with layers as early as possible; None:
        impossible.
        """
        ends, low, count = [], 0, self.model.count
        taken = max(1, count // self.stages)
        for stage in range(self.stages):
            left = count - (self.stages - 1 - stage)  # every later stage needs a layer
            kind = self.kinds[stage]

            def good(high: int, stage: int = stage, low: int = low, kind: tuple[DeviceGroup, ...] = kind) -> bool:
                return any(
                    self.seconds(kind, how, low, high) <= limit_s and self.fits(stage, how, low, high)
                    for how in self.recomputes
                )

            high = min(left, low + taken)
            if good(high):
                while high < left and good(high + 1):
                    high += 1
            else:
                high -= 1
                while high > low and not good(high):
                    high -= 1
                if high == low:
                    return None
            ends.append(high)
            taken, low = high - low, high
        return ends if low == count else None

    def best(self) -> list[int] | None:
        """Returns the partition with the fastest slowest stage, as the ends of stages; None: no partition fits into
        memory.
        """
        if self.stages > self.model.count:
            return None
        if self.stages == 1:
            return (
                [self.model.count] if any(self.fits(0, how, 0, self.model.count) for how in self.recomputes) else None
            )
        ends = self.within(float("inf"))
        if ends is None:
            return None
        high = self.slowest(ends)
        low = 0.0
        for _ in range(HALVINGS):
            if high - low <= PRECISION * high:
                break
            middle = (low + high) / 2 if low else high / 2
            found = self.within(middle)
            if found is None:
                low = middle
            else:
                ends, high = found, self.slowest(found)
        return ends

    def slowest(self, ends: list[int]) -> float:
        """Returns the seconds of the slowest of these stages, each with as little recomputation as its memory
        allows.
        """

        def own(stage: int, low: int, high: int) -> float:
            kind = self.kinds[stage]
            return min(
                self.seconds(kind, how, low, high) for how in self.recomputes if self.fits(stage, how, low, high)
            )

        return max(own(stage, low, high) for stage, (low, high) in enumerate(zip([0, *ends[:-1]], ends)))

    def strategy(self, ends: list[int]) -> ParallelStrategy:
        """Returns the strategy whose stages end at these layers."""
        lows = [0, *ends[:-1]]
        stages = tuple(Stage(((low, high),), kind) for kind, low, high in zip(self.kinds, lows, ends))
        return msgspec.structs.replace(self.settings, stages=stages)
