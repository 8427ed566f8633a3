"""Cuts a chain of layers into stages on given ranks so that the slowest stage is as fast as possible and all fit.

Where a stage may compute activations again in several ways, it takes as many layers as the best of them allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cost_model.described.layer_costs import LayerCosts, Model, costs_of
from cost_model.described.memory import offloaded_bytes, part_memory
from cost_model.described.spread import Part, Recompute, Spread, Stage, live_chunks
from cost_model.machines.pools import Machines


class Chain:
    """The stages' ranks in order; answers how many layers a stage takes within so many seconds and its memory."""

    def __init__(
        self,
        model: Model,
        machines: Machines,
        kinds: Sequence[tuple[Part, ...]],
        settings: Spread,
        ranks: int,
        ways: Sequence[Recompute] = (),
    ) -> None:
        """`ways`: what a stage may compute again; none: as the settings say."""
        self.model, self.machines, self.settings = model, machines, settings
        self.kinds, self.ways = kinds, tuple(ways) or (settings.recompute,)
        of: dict[tuple[tuple[Part, ...], Recompute], list[LayerCosts]] = {}
        for kind in dict.fromkeys(kinds):
            replicas = sum(part.replicas for part in kind)
            for how in self.ways:
                of[kind, how] = [costs_of(model, settings, part, ranks, replicas, how) for part in kind]
        self.costs = of
        self.stages = len(kinds)

    def seconds(self, kind: tuple[Part, ...], how: Recompute, low: int, high: int) -> float:
        """Of both passes of layers low..high-1, on the slowest part."""
        costs = self.costs[kind, how]
        if len(costs) == 1:
            return costs[0].forward(low, high) + costs[0].backward(low, high)
        return max(one.forward(low, high) for one in costs) + max(one.backward(low, high) for one in costs)

    def live(self, stage: int) -> int:
        """Micro-batches that a stage holds at its peak."""
        return live_chunks(self.settings.schedule, self.stages, 1, self.settings.micro_batches, stage)

    def fits(self, stage: int, how: Recompute, low: int, high: int) -> bool:
        kind = self.kinds[stage]
        live = self.live(stage)
        replicas = sum(part.replicas for part in kind)
        for part, one in zip(kind, self.costs[kind, how]):
            s, pool, ranges = self.settings, self.machines.pools[part.pool], ((low, high),)
            used = part_memory(one, ranges, part, replicas, live, s.zero, self.stages, s.offload)
            if used.total_bytes > pool.memory_bytes:
                return False
            if offloaded_bytes(one, ranges, replicas, s.zero, s.offload) > pool.host_bytes:
                return False
        return True

    def within(self, limit_s: float) -> list[int] | None:
        """Ends of the stages where none takes longer, layers as early as possible; None: impossible."""
        ends, low, count = [], 0, self.model.count
        taken = max(1, count // self.stages)
        for stage in range(self.stages):
            left = count - (self.stages - 1 - stage)  # every later stage needs a layer
            kind = self.kinds[stage]

            def good(high: int, stage: int = stage, low: int = low, kind: tuple[Part, ...] = kind) -> bool:
                return any(
                    self.seconds(kind, how, low, high) <= limit_s and self.fits(stage, how, low, high)
                    for how in self.ways
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
        """Ends of the stages that minimise the slowest stage; None: no division fits into memory."""
        if self.stages > self.model.count:
            return None
        if self.stages == 1:
            return [self.model.count] if any(self.fits(0, how, 0, self.model.count) for how in self.ways) else None
        ends = self.within(float("inf"))
        if ends is None:
            return None
        high = self.slowest(ends)
        low = 0.0
        for _ in range(24):
            if high - low <= 2e-4 * high:
                break
            middle = (low + high) / 2 if low else high / 2
            found = self.within(middle)
            if found is None:
                low = middle
            else:
                ends, high = found, self.slowest(found)
        return ends

    def slowest(self, ends: list[int]) -> float:
        """Seconds of the slowest of these stages, each computing again as little as its memory lets it."""

        def own(stage: int, low: int, high: int) -> float:
            kind = self.kinds[stage]
            return min(self.seconds(kind, how, low, high) for how in self.ways if self.fits(stage, how, low, high))

        return max(own(stage, low, high) for stage, (low, high) in enumerate(zip([0, *ends[:-1]], ends)))

    def spread(self, ends: list[int]) -> Spread:
        lows = [0, *ends[:-1]]
        stages = tuple(Stage(((low, high),), kind) for kind, low, high in zip(self.kinds, lows, ends))
        return msgspec.structs.replace(self.settings, stages=stages)
