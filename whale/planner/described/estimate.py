"""What the search estimates in microseconds: layers' seconds on a rank, the end of a step, whether layers have room."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from cost_model.described.layer_costs import LayerCosts, Model
from cost_model.described.memory import BASE_BYTES, states
from cost_model.described.spread import Offload, Part, Recompute, Spread
from cost_model.described.stage_costs import reduction_s
from cost_model.machines.pools import Machines

KEPT = 40  # candidates of a shape


@dataclass(frozen=True)
class Limits:
    """What the user has fixed; None: free.

    `budget_s`: seconds of computing for the search; the best spread so far is returned.
    """

    stages: int | None = None
    tensor: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    recompute: str | None = None
    zero: int | None = None
    chunks: int | None = None
    offload: Offload | None = None
    budget_s: float = 8.0
    exact_units: int = 8


@dataclass(slots=True)
class Candidate:
    """A spread before its layers are cut: estimated seconds, the ranks of its stages, its settings."""

    estimate_s: float
    kinds: tuple[tuple[tuple[Part, ...], int], ...]  # (parts, so many stages), in order
    settings: Spread
    chunks: int = 1

    @property
    def stages(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def key(self) -> tuple[int, int, int]:
        """What alternatives are told apart by: stages, largest tensor degree, replicas."""
        parts = self.kinds[0][0]
        return self.stages, max(p.tensor for p in parts), sum(p.replicas for p in parts)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


class Estimates:
    """What a layer, a step's end and a stage's memory cost on a cluster's ranks, remembered."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Limits) -> None:
        self.model, self.machines, self.batch, self.limits = model, machines, batch, limits
        self.started = time.process_time()
        self.ranks = machines.devices
        self.zero = 1 if limits.zero is None else limits.zero
        self.offload: Offload = limits.offload or "none"
        # In a hurry only powers of two of rows, and numbers of stages that divide the layers, are estimated.
        self.coarse = limits.budget_s < 2.0
        self.shapes: dict[tuple[str, int, int], list[float]] = {}
        self.estimated = 0
        self.each: dict[tuple[int, int, int, str, bool], tuple[LayerCosts, float, float]] = {}

    def late(self, part: float = 1.0) -> bool:
        return time.process_time() - self.started > part * self.limits.budget_s

    def whole(self, pool: int, tensor: int, rows: int, how: tuple[str, bool]) -> tuple[LayerCosts, float, float]:
        """(costs, seconds of all layers' passes, seconds of one layer in the middle)."""
        key = (pool, tensor, rows, *how)
        if key not in self.each:
            # Experts are taken to be divided over all of the pool's devices, until a stage is known.
            replicas = self.machines.pools[pool].units(tensor) if self.model.experts else 1
            one = self.model.layer_costs(pool, tensor, rows, *how, self.ranks, replicas)
            count = self.model.count
            total = one.forward(0, count) + one.backward(0, count)
            self.each[key] = one, total, total / count
        return self.each[key]

    def rows_of(self, pool: int, tensor: int) -> list[int]:
        known = self.model.row_choices(pool, tensor)
        return known if known is not None else list(range(1, min(self.batch, 128) + 1))

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        found = self.model.recomputes()
        wanted = self.limits.recompute
        return [one for one in found if wanted is None or one[0] == wanted]

    def ways(self, sequence_parallel: bool) -> list[Recompute]:
        """What a stage may compute again; least first."""
        return [kind for kind, parallel in self.recomputes() if parallel == sequence_parallel]

    def tensors(self, pool: int) -> list[int]:
        found = self.model.tensor_degrees(pool)
        return [d for d in found if self.limits.tensor in (None, d)]

    def settings(self, micro_batches: int, how: tuple[str, bool]) -> Spread:
        recompute, sequence_parallel = how
        return Spread((), micro_batches, recompute, sequence_parallel, self.zero, offload=self.offload)  # type: ignore[arg-type]

    def after_s(self, parts: tuple[Part, ...], how: tuple[str, bool], stages: int) -> float:
        """Seconds of the reduction and the update of one of so many equal stages."""
        costs = [self.whole(p.pool, p.tensor, p.rows, how)[0] for p in parts]
        own = [(one.parameters[-1] - one.twice) / stages for one in costs]
        reduce_s = reduction_s(self.model, self.machines, parts, own, self.zero)
        replicas = sum(p.replicas for p in parts) if self.zero >= 1 else 1
        update_s = 0.0
        for part, one, parameters in zip(parts, costs, own):
            if one.update_s is not None:
                update_s = max(update_s, one.update_s[-1] / stages)
                continue
            device = self.machines.pools[part.pool].device
            rate = device.memory_bytes_per_s * self.machines.pools[part.pool].entry.share
            update_s = max(update_s, self.model.stack.optimizer_bytes * parameters / replicas / rate)
        return reduce_s + update_s

    def keeps(self, estimate_s: float, shape: tuple[str, int, int]) -> bool:
        """Whether a candidate is among the best of its shape so far (recompute, size of the pipeline, tensors)."""
        self.estimated += 1
        best = self.shapes.setdefault(shape, [])
        if len(best) < KEPT:
            heapq.heappush(best, -estimate_s)
            return True
        if -best[0] <= estimate_s:
            return False
        heapq.heapreplace(best, -estimate_s)
        return True

    def roomy(self, one: Candidate) -> bool:
        """Whether the stages' memory could hold all layers, if layers could be divided at will."""
        s, stages = one.settings, one.stages
        room, at = 0.0, 0
        how = (s.recompute, s.sequence_parallel)
        for parts, count in one.kinds:
            replicas = sum(p.replicas for p in parts) if s.zero >= 1 else 1
            worst: list[tuple[float, float, float]] = []
            for p in parts:
                layers = self.whole(p.pool, p.tensor, p.rows, how)[0]
                held, gradients, optimizer = states(layers, ((0, self.model.count),), replicas, s.zero)
                on_device = {"none": held + gradients + optimizer, "state": held + gradients, "all": 0.0}[s.offload]
                state = on_device / self.model.count
                free = self.machines.pools[p.pool].memory_bytes - BASE_BYTES
                worst.append((free, state, layers.held_bytes[-1] / self.model.count))
            for index in range(at, at + count):
                live = min(s.micro_batches, stages - index)
                room += min(free / max(1.0, state + live * held) for free, state, held in worst)
            at += count
        return room >= self.model.count

    def bound_s(self) -> float:
        """No spread of these families is faster: all devices at their best rate, all of the time, nothing sent."""
        speed = 0.0
        for pool in self.machines.pools:
            rates = [0.0]
            for (k, tensor, rows, *_), (_, total, _) in self.each.items():
                if k == pool.number:
                    rates.append(rows / total / tensor)
            speed += pool.devices * max(rates)
        return self.batch / speed if speed else 0.0
