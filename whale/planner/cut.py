"""Cuts a chain of layers into stages on given ranks so that the slowest stage is as fast as possible and all fit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .evaluate import layers_of, offloaded_bytes, part_memory
from .model import Layers, Model
from .pools import Machines
from .spread import Part, Spread, Stage


class Chain:
    """The stages' ranks in order; answers how many layers a stage takes within so many seconds and its memory."""

    def __init__(
        self, model: Model, machines: Machines, kinds: Sequence[tuple[Part, ...]], settings: Spread, ranks: int
    ) -> None:
        self.model, self.machines, self.settings = model, machines, settings
        self.kinds = kinds
        of: dict[tuple[Part, ...], list[Layers]] = {}
        for kind in kinds:
            if kind not in of:
                replicas = sum(part.replicas for part in kind)
                of[kind] = [layers_of(model, settings, part, ranks, replicas) for part in kind]
        self.costs = of
        self.stages = len(kinds)
        self.memory: dict[tuple[tuple[Part, ...], int, int, int, bool, bool], bool] = {}

    def seconds(self, kind: tuple[Part, ...], low: int, high: int) -> float:
        """Of both passes of layers low..high-1, on the slowest part."""
        costs = self.costs[kind]
        if len(costs) == 1:
            return costs[0].forward(low, high) + costs[0].backward(low, high)
        return max(one.forward(low, high) for one in costs) + max(one.backward(low, high) for one in costs)

    def live(self, stage: int) -> int:
        count = self.settings.micro_batches
        return count if self.settings.schedule == "gpipe" else min(count, self.stages - stage)

    def fits(self, stage: int, low: int, high: int) -> bool:
        kind = self.kinds[stage]
        live = self.live(stage)
        replicas = sum(part.replicas for part in kind)
        for part, one in zip(kind, self.costs[kind]):
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
                return self.seconds(kind, low, high) <= limit_s and self.fits(stage, low, high)

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
            return [self.model.count] if self.fits(0, 0, self.model.count) else None
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
        lows = [0, *ends[:-1]]
        return max(self.seconds(kind, low, high) for kind, low, high in zip(self.kinds, lows, ends))

    def spread(self, ends: list[int]) -> Spread:
        lows = [0, *ends[:-1]]
        stages = tuple(Stage(((low, high),), kind) for kind, low, high in zip(self.kinds, lows, ends))
        return msgspec.structs.replace(self.settings, stages=stages)
