"""Estimates the seconds of layers on a rank, the end of a step, and whether layers fit into memory, in microseconds
each.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

from cost_model.analytic.evaluate import tied_between_s
from cost_model.analytic.layer_costs import LayerCosts, Model
from cost_model.analytic.memory import states
from cost_model.analytic.stage_costs import experts_s, reduction_s
from cost_model.cluster.pools import Machines
from cost_model.kernels.compute import round_ranks
from cost_model.simulator import not_hidden_s
from whale.ir.strategy import DeviceGroup, Offload, ParallelStrategy, Recompute, count_expert_ranks
from whale.planner.analytic_search.candidates import Candidate, Constraints
from whale.planner.analytic_search.work import ESTIMATE_S, LAYERS_S, Work

KEPT_PER_SHAPE = 40  # candidates
MOST_ROWS = 128  # of a rank's micro-batch, where all sizes are known
GRID_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # for which layers' seconds are computed
BACKWARD = 2 / 3  # of both passes
FAR_BEHIND = 1.6  # times the best estimate, which a candidate may not exceed


def divisors(n: int) -> list[int]:
    """Returns all divisors of a positive number, in growing order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


class Estimates:
    """Estimates the costs of layers, of the end of a step, and of a stage's memory on a cluster's ranks; some are
    cached.

    Attributes:
        context: ranks that divide the tokens of a row, each of which counts as a replica with that row.
        batch: rows of a step, each counted `context` times.
        data: replicas of each stage that the user has fixed, of each row `context`; None: any number.
        replicas_step: the replicas of a stage are a multiple of it.
    """

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints, work: Work) -> None:
        self.model, self.machines, self.limits, self.work = model, machines, limits, work
        self.context = limits.context or 1
        self.batch = batch * self.context
        self.data = None if limits.data is None else limits.data * self.context
        self.replicas_step = math.lcm(self.context, limits.experts or 1)
        self.ranks = round_ranks(machines.devices)
        self.zero = 1 if limits.zero is None else limits.zero
        self.offload: Offload = limits.offload or "none"
        self.shapes: dict[tuple[object, ...], list[float]] = {}
        self.estimated, self.kept_per_shape = 0, KEPT_PER_SHAPE
        # Whether candidates are left out that are far behind the best one with room, and that one; estimates that are
        # too long to be looked at beside what was simulated.
        self.prunes, self.best_estimate_s, self.known_s = True, math.inf, math.inf
        self.able = [one for one in model.recomputes() if limits.recompute in (None, one[0])]
        self.kinds = {way: [kind for kind, parallel in self.able if parallel == way] for way in (False, True)}
        self.each: dict[tuple[int, int, int, str, bool, int], tuple[LayerCosts, float, float]] = {}
        self.after: dict[tuple[tuple[tuple[int, int, int], ...], int], tuple[float, float]] = {}
        self.tied: dict[tuple[int, int, int, int], float] = {}

    def predict_whole(
        self, pool: int, tensor: int, rows: int, how: tuple[str, bool], ways: int = 0
    ) -> tuple[LayerCosts, float, float]:
        """Returns (costs, seconds of all layers' passes with what experts exchange, mean seconds of one layer).

        Args:
            ways: ranks that divide a layer's experts; 0: all of the pool's devices, until a stage is known.
        """
        replicas = 1
        if not self.model.experts:
            ways = 0
        else:
            groups = self.machines.pools[pool].tensor_groups(tensor)
            ways = ways or self.limits.experts or count_expert_ranks(self.model.experts, groups)
            replicas = max(1, groups // ways) * ways
        key = (pool, tensor, rows, *how, ways)
        if key not in self.each:
            self.work.spend_once((id(self.model), self.context, key), LAYERS_S)
            more = (self.context, ways) if self.context > 1 or ways else ()
            one = self.model.layer_costs(pool, tensor, rows, *how, self.ranks, replicas, *more)
            count = self.model.count
            total = one.forward(0, count) + one.backward(0, count)
            if ways > 1:  # tokens go to the experts and come back, in each pass (see `stage_costs`)
                group, times = self.machines.data_group(((pool, tensor, ways),)), 3 if how[0] == "full" else 2
                total += times * count * experts_s(group, one) * (1.0 - self.model.stack.hides_experts)
            self.each[key] = one, total, total / count
        return self.each[key]

    def shared_s(self, pool: int, tensor: int, rows: int, how: tuple[str, bool]) -> float:
        """Returns the seconds of all layers' passes, by which unequal replicas share rows.

        By formulas they are computed for some numbers of rows only; between these they grow evenly.
        """
        if rows < GRID_ROWS[2] or rows > GRID_ROWS[-1] or self.model.row_choices(pool, tensor) is not None:
            return self.predict_whole(pool, tensor, rows, how)[1]
        at = bisect_left(GRID_ROWS, rows)
        high, low = GRID_ROWS[at], GRID_ROWS[at - 1]
        high_s = self.predict_whole(pool, tensor, high, how)[1]
        if rows == high:
            return high_s
        low_s = self.predict_whole(pool, tensor, low, how)[1]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def rows_of(self, pool: int, tensor: int) -> list[int]:
        """Returns the micro-batch sizes of a rank that are tried, in growing order."""
        known = self.model.row_choices(pool, tensor)
        if known is not None:
            return known
        found = list(range(1, min(self.batch, MOST_ROWS) + 1))
        rows, micro_batches = self.limits.micro_batch, self.limits.micro_batches
        if micro_batches is not None and self.batch % micro_batches == 0:  # few of them may be large ones
            found += [n for n in divisors(self.batch // micro_batches) if n > MOST_ROWS]
        if rows is not None and found[-1] < rows <= self.batch:
            found.append(rows)
        return found

    def is_allowed(self, part: DeviceGroup) -> bool:
        """Tells whether a stage may consist of these ranks: their rows are known, and the user's choices are
        respected.
        """
        known, limits = self.rows_of(part.pool, part.tensor), self.limits
        fixed = limits.micro_batch in (None, part.rows) and self.data in (None, part.replicas)
        return fixed and known[0] <= part.rows <= known[-1]

    def keeps_choices(self, strategy: ParallelStrategy) -> bool:
        """Tells whether a strategy is as the user has fixed it; moves that improve one do not all look at that."""
        limits, stages = self.limits, strategy.stages
        parts = [part for stage in stages for part in stage.parts]
        return (
            limits.stages in (None, len(stages))
            and limits.chunks in (None, strategy.chunks)
            and limits.micro_batches in (None, strategy.micro_batches)
            and all(self.data in (None, stage.replicas) for stage in stages)
            and all(stage.replicas % self.replicas_step == 0 for stage in stages)
            and limits.experts in (None, strategy.expert_ranks)
            and all(limits.tensor in (None, part.tensor) for part in parts)
            and all(limits.micro_batch in (None, part.rows) for part in parts)
        )

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns the pairs (recompute, sequence parallel) that the model supports and the user allows."""
        return self.able

    def recompute_kinds(self, sequence_parallel: bool) -> list[Recompute]:
        """Returns the kinds of recompute that a stage may use, the least recomputation first."""
        return self.kinds[sequence_parallel]

    def tensors(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees on a pool that the user allows."""
        found = self.model.tensor_degrees(pool)
        return [d for d in found if self.limits.tensor in (None, d)]

    def settings(self, micro_batches: int, how: tuple[str, bool]) -> ParallelStrategy:
        """Returns a strategy without stages; `how`: (recompute, sequence parallel)."""
        recompute, sequence_parallel = how
        return ParallelStrategy(
            (),
            micro_batches,
            recompute,  # type: ignore[arg-type]
            sequence_parallel,
            self.zero,
            offload=self.offload,
            context=self.context,
            expert_ranks=self.limits.experts or 0,
        )

    def predict_after_s(
        self, parts: tuple[DeviceGroup, ...], how: tuple[str, bool], stages: int
    ) -> tuple[float, float]:
        """Estimates the end of a step, after the last micro-batch, for one of ``stages`` equal stages.

        Returns:
            (seconds of the gradient reduction, including the part overlapped with passes; seconds of the update).
        """
        key = tuple((p.pool, p.tensor, p.replicas) for p in parts), stages
        if (known := self.after.get(key)) is not None:
            return known
        costs = [self.predict_whole(p.pool, p.tensor, p.rows, how)[0] for p in parts]
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
        if all(one.update_s is None for one in costs):  # measured updates may depend on rows
            self.after[key] = reduce_s, update_s
        return reduce_s, update_s

    def predict_reduced_s(
        self, reduce_s: float, passes_s: float, stages: int, chunks: int, micro_batches: int
    ) -> float:
        """Estimates the part of the gradient reduction that passes do not overlap, for equal stages; `passes_s`: of one
        micro-batch.
        """
        if not self.model.stack.hides_data_parallel:
            return reduce_s
        counts = [max(1, self.model.count // (stages * chunks))] * chunks
        back = [BACKWARD * passes_s / chunks] * chunks
        return not_hidden_s(reduce_s, counts, back, min(stages, micro_batches))

    def tied_s(self, first: DeviceGroup, last: DeviceGroup, stages: int) -> float:
        """Returns the seconds to sum the gradients of the weights that the first and the last of equal stages share."""
        if stages == 1 or not self.model.tied_parameters:
            return 0.0
        key = first.pool, last.pool, min(first.tensor, last.tensor), first.ranks * (stages - 1)
        if key not in self.tied:
            self.tied[key] = tied_between_s(self.model, self.machines, first, last, key[-1])
        return self.tied[key]

    def sends_s(self, parts: Sequence[DeviceGroup], how: tuple[str, bool]) -> float:
        """Estimates the seconds to send a micro-batch to an equal stage and its gradient back, over the slowest
        path.
        """
        ranks, cut = sum(part.ranks for part in parts), max(1, self.model.count // 2)
        each = 0.0
        for part in parts:
            path = min(self.machines.send_path(part.pool, other.pool, ranks) for other in parts)
            each = max(each, self.model.send_s(cut, part.tensor, part.rows / self.context, how[1], path))
        return 2 * each

    def far_behind(self, estimate_s: float) -> bool:
        """Tells whether an estimate is so far behind the best candidate that has room that it is not worth a look."""
        most_s = min(FAR_BEHIND * self.best_estimate_s, self.limits.faster_than_s, self.known_s)
        return self.prunes and estimate_s > most_s

    def keeps(self, estimate_s: float, shape: tuple[object, ...]) -> bool:
        """Tells whether a candidate is among the best so far with its shape (recompute, stages, tensors, pools)."""
        self.estimated += 1
        self.work.spend(ESTIMATE_S)
        if self.far_behind(estimate_s):
            return False
        best = self.shapes.setdefault(shape, [])
        if len(best) < self.kept_per_shape:
            heapq.heappush(best, -estimate_s)
            return True
        if -best[0] <= estimate_s:
            return False
        heapq.heapreplace(best, -estimate_s)
        return True

    def noted(self, one: Candidate) -> Candidate:
        """Returns a candidate, whose estimate is noted where it is the best one with room."""
        if self.prunes and one.estimate_s < self.best_estimate_s and self.roomy(one):
            self.best_estimate_s = one.estimate_s
        return one

    def roomy(self, one: Candidate) -> bool:
        """Tells whether the stages' memory could hold all layers if layers were divisible at will."""
        s, stages = one.settings, one.stages
        room, at = 0.0, 0
        how = (s.recompute, s.sequence_parallel)
        for parts, count in one.kinds:
            replicas = sum(p.replicas for p in parts) if s.zero >= 1 else 1
            worst: list[tuple[float, float, float]] = []
            for p in parts:
                layers = self.predict_whole(p.pool, p.tensor, p.rows, how)[0]
                held, gradients, optimizer = states(layers, ((0, self.model.count),), replicas, s.zero)
                on_device = {"none": held + gradients + optimizer, "optimizer": held + gradients, "parameters": 0.0}[
                    s.offload
                ]
                state = on_device / self.model.count
                pool = self.machines.pools[p.pool]
                free = pool.memory_bytes - 1e9 * max(pool.device.context_gb, self.model.stack.base_gb)
                worst.append((free, state, layers.held_bytes[-1] / self.model.count))
            for index in range(at, at + count):
                live = min(s.micro_batches, stages - index)
                room += min(free / max(1.0, state + live * held) for free, state, held in worst)
            at += count
        return room >= self.model.count

    def has_room_for_states(self) -> bool:
        """Tells whether all devices together could hold the states, however these are divided."""
        pool = next((one.number for one in self.machines.pools if self.tensors(one.number)), None)
        if pool is None:
            return False
        tensor = self.tensors(pool)[0]
        one = self.predict_whole(pool, tensor, self.rows_of(pool, tensor)[0], self.recomputes()[0], 1)[0]
        held, gradients, optimizer = states(one, ((0, self.model.count),), 1, 0)
        on_devices = {"none": held + gradients + optimizer, "optimizer": held + gradients, "parameters": 0.0}
        return tensor * on_devices[self.offload] <= sum(
            pool.devices * pool.memory_bytes for pool in self.machines.pools
        )

    def rates(self) -> dict[tuple[str, float], float]:
        """Returns the most rows that a device of each kind, by its name and share, trains in a second."""
        found: dict[tuple[str, float], float] = {}
        for (number, tensor, rows, *_), (one, _, _) in self.each.items():
            pool, total = self.machines.pools[number], one.forward(0, one.count) + one.backward(0, one.count)
            kind = pool.device.name, pool.entry.share
            found[kind] = max(found.get(kind, 0.0), rows / total / tensor)
        return found

    def bound_s(self) -> float:
        """Returns a lower bound of the step: all devices at peak throughput all of the time, without communication."""
        return least_s(self.machines, self.batch, self.rates())


def least_s(machines: Machines, batch: int, rates: dict[tuple[str, float], float]) -> float:
    """Returns the seconds of a step on all devices without any loss; 0: no device's rate is known."""
    speed = sum(pool.devices * rates.get((pool.device.name, pool.entry.share), 0.0) for pool in machines.pools)
    return batch / speed if speed else 0.0


def peak_rates(model: Model, machines: Machines, batch: int) -> dict[tuple[str, float], float]:
    """Returns at most how many rows a device of each kind, by name and share, trains in a second, without any loss."""
    one = Estimates(model, machines, batch, Constraints(), Work(math.inf))
    one.ranks = 1  # nobody waits for a slower one
    for pool in machines.pools:
        for tensor in model.tensor_degrees(pool.number):
            known = model.row_choices(pool.number, tensor)
            for rows in GRID_ROWS if known is None else known:
                if rows <= batch:
                    one.predict_whole(pool.number, tensor, rows, one.recomputes()[0])
    return one.rates()
