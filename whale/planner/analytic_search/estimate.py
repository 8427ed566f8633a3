"""Estimates, within microseconds each, the seconds of layers on a rank, of the end of a step, and whether layers
fit.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from functools import lru_cache

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

KEPT_PER_SHAPE = 40  # candidates kept of each shape
MOST_ROWS = 128  # largest micro-batch of a rank that is tried, where the model has formulas for any size
GRID_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows for which `shared_s` computes layers' seconds
BACKWARD = 2 / 3  # the backward pass's part of both passes' seconds
MOST_SENDS = 1 << 16  # pairs of stages between which the seconds of a send are kept
FAR_BEHIND = 1.6  # a candidate is pruned if its estimate is longer than the best one by this factor


def divisors(n: int) -> list[int]:
    """Returns all positive divisors of a positive integer in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


class Estimates:
    """Estimates the costs of layers, of the end of a step, and of a stage's memory on a cluster's ranks, with caches.

    Attributes:
        context: context-parallel degree: ranks that divide the tokens of a row, each counted as a replica with that
            row.
        batch: rows of a step times `context`.
        data: replicas of each stage that the user has fixed, times `context`; None: any number.
        replicas_step: the number of replicas of a stage has to be a multiple of this.
        keeps_any: no choice is fixed that `keeps_choices` looks at.
    """

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints, work: Work) -> None:
        self.model, self.machines, self.limits, self.work = model, machines, limits, work
        self.context = limits.context or 1
        self.batch = batch * self.context
        self.data = None if limits.data is None else limits.data * self.context
        self.replicas_step = math.lcm(self.context, limits.experts or 1)
        fixed = (
            getattr(limits, name) for name in ("stages", "chunks", "micro_batches", "micro_batch", "data", "tensor")
        )
        self.keeps_any = self.replicas_step == 1 and limits.experts is None and all(one is None for one in fixed)
        self.ranks = round_ranks(machines.devices)
        self.zero = 1 if limits.zero is None else limits.zero
        self.offload: Offload = limits.offload or "none"
        self.shapes: dict[tuple[object, ...], list[float]] = {}
        self.estimated, self.kept_per_shape = 0, KEPT_PER_SHAPE
        # Whether candidates far behind are pruned; the best estimate of a candidate with enough memory; the longest
        # estimate that is worth a look, given what was simulated.
        self.prunes, self.best_estimate_s, self.known_s = True, math.inf, math.inf
        self.able = [one for one in model.recomputes() if limits.recompute in (None, one[0])]
        self.kinds = {way: [kind for kind, parallel in self.able if parallel == way] for way in (False, True)}
        self.each: dict[tuple[int, int, int, str, bool, int], tuple[LayerCosts, float, float]] = {}
        self.after: dict[tuple[tuple[tuple[int, int, int], ...], int], tuple[float, float]] = {}
        self.tied: dict[tuple[int, int, int, int], float] = {}
        # What is asked for most often, and never changes during a search: results of the methods of these names.
        self.predict_whole = lru_cache(maxsize=None)(self._predict_whole)
        self.shared_s = lru_cache(maxsize=None)(self._find_shared_s)
        self.tensors = lru_cache(maxsize=None)(self._list_tensors)
        self.rows_of = lru_cache(maxsize=None)(self._list_rows)
        self.sends_s = lru_cache(maxsize=MOST_SENDS)(self._predict_sends_s)

    def _predict_whole(
        self, pool: int, tensor: int, rows: int, how: tuple[str, bool], ways: int = 0
    ) -> tuple[LayerCosts, float, float]:
        """Returns the predicted cost of the whole model, as if all layers lay on one rank of a pool.

        Args:
            pool: number of the pool.
            tensor: tensor-parallel degree.
            rows: rows of a micro-batch on this rank.
            how: (kind of recompute, sequence parallel).
            ways: expert-parallel degree; 0: all the pool's devices divide a layer's experts, as no stage is known yet.

        Returns:
            (costs of the layers; seconds of the forward and backward pass of all layers, with the experts' all-to-all;
            these seconds divided by the number of layers).
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
            if ways > 1:  # all-to-all to the experts and back, in each pass (see `stage_costs`)
                group, times = self.machines.data_group(((pool, tensor, ways),)), 3 if how[0] == "full" else 2
                total += times * count * experts_s(group, one) * (1.0 - self.model.stack.hides_experts)
            self.each[key] = one, total, total / count
        return self.each[key]

    def _find_shared_s(self, pool: int, tensor: int, rows: int, how: tuple[str, bool], ways: int = 0) -> float:
        """Returns the seconds of both passes of all layers on one rank, by which unequal replicas share rows.

        To save time, a model with formulas is computed for the row counts `GRID_ROWS` only, and interpolated linearly
        between. For `ways` see `predict_whole`.
        """
        if rows < GRID_ROWS[2] or rows > GRID_ROWS[-1] or self.model.row_choices(pool, tensor) is not None:
            return self.predict_whole(pool, tensor, rows, how, ways)[1]
        at = bisect_left(GRID_ROWS, rows)
        high, low = GRID_ROWS[at], GRID_ROWS[at - 1]
        high_s = self.predict_whole(pool, tensor, high, how, ways)[1]
        if rows == high:
            return high_s
        low_s = self.predict_whole(pool, tensor, low, how, ways)[1]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def _list_rows(self, pool: int, tensor: int) -> list[int]:
        """Returns the micro-batch sizes to try on one rank of a pool, in rows, ascending."""
        known = self.model.row_choices(pool, tensor)
        if known is not None:
            return known
        found = list(range(1, min(self.batch, MOST_ROWS) + 1))
        rows, micro_batches = self.limits.micro_batch, self.limits.micro_batches
        if micro_batches is not None and self.batch % micro_batches == 0:  # few micro-batches may be large
            found += [n for n in divisors(self.batch // micro_batches) if n > MOST_ROWS]
        if rows is not None and found[-1] < rows <= self.batch:
            found.append(rows)
        return found

    def is_allowed(self, part: DeviceGroup) -> bool:
        """Returns True if a stage may contain this device group: the model has costs for its rows, and the group
        respects the user's micro-batch size and number of replicas.
        """
        known, limits = self.rows_of(part.pool, part.tensor), self.limits
        fixed = limits.micro_batch in (None, part.rows) and self.data in (None, part.replicas)
        return fixed and known[0] <= part.rows <= known[-1]

    def keeps_choices(self, strategy: ParallelStrategy) -> bool:
        """Returns True if a strategy has the numbers (stages, chunks, micro-batches, replicas, rows, degrees) that the
        user fixed.

        Moves that improve a strategy may change some of them, so that each result is checked here before simulation.
        """
        if self.keeps_any:
            return True
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
        """Returns the kinds of recompute that a stage may use, with the least recomputation first."""
        return self.kinds[sequence_parallel]

    def _list_tensors(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees that the model supports on a pool and the user allows."""
        found = self.model.tensor_degrees(pool)
        return [d for d in found if self.limits.tensor in (None, d)]

    def settings(self, micro_batches: int, how: tuple[str, bool]) -> ParallelStrategy:
        """Returns a strategy without stages, which carries all other settings of a candidate; `how`: (recompute,
        sequence parallel).
        """
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
        """Estimates what follows the last micro-batch of a step, for one of ``stages`` equal stages.

        Args:
            parts: the stage's device groups.
            how: (kind of recompute, sequence parallel).

        Returns:
            (seconds of the gradient reduction, including what overlaps with backward passes; seconds of the optimizer
            update).
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
        """Estimates the seconds of the gradient reduction that backward passes do not hide, for equal stages.

        Args:
            reduce_s: seconds of the whole reduction.
            passes_s: seconds of both passes of one micro-batch on a stage.
            chunks: model chunks of each stage.
        """
        if not self.model.stack.hides_data_parallel:
            return reduce_s
        counts = [max(1, self.model.count // (stages * chunks))] * chunks
        back = [BACKWARD * passes_s / chunks] * chunks
        return not_hidden_s(reduce_s, counts, back, min(stages, micro_batches))

    def tied_s(self, first: DeviceGroup, last: DeviceGroup, stages: int) -> float:
        """Returns the seconds to all-reduce the gradients of tied weights (embedding and head) between first and last
        stage.

        The stages in between are taken to be equal to the first one; 0 with one stage or without tied weights.
        """
        if stages == 1 or not self.model.tied_parameters:
            return 0.0
        key = first.pool, last.pool, min(first.tensor, last.tensor), first.ranks * (stages - 1)
        if key not in self.tied:
            self.tied[key] = tied_between_s(self.model, self.machines, first, last, key[-1])
        return self.tied[key]

    def _predict_sends_s(self, parts: tuple[DeviceGroup, ...], sequence_parallel: bool) -> float:
        """Estimates the seconds to send one micro-batch's activations to the next stage and their gradients back.

        Args:
            parts: device groups of the sending and the receiving stage; the slowest path between any two of them is
                taken.
        """
        ranks, cut = sum(part.ranks for part in parts), max(1, self.model.count // 2)
        each = 0.0
        for part in parts:
            path = min(self.machines.send_path(part.pool, other.pool, ranks) for other in parts)
            each = max(each, self.model.send_s(cut, part.tensor, part.rows / self.context, sequence_parallel, path))
        return 2 * each

    def far_behind(self, estimate_s: float) -> bool:
        """Returns True if an estimated step is too long to be worth a look, compared to the best candidate with enough
        memory.
        """
        most_s = min(FAR_BEHIND * self.best_estimate_s, self.limits.faster_than_s, self.known_s)
        return self.prunes and estimate_s > most_s

    def may_keep(self, least_s: float, shape: tuple[object, ...]) -> bool:
        """Returns False if no estimate from `least_s` on is kept of this shape (see `keeps`); counts the estimate."""
        self.estimated += 1
        self.work.spend(ESTIMATE_S)
        if self.far_behind(least_s):
            return False
        best = self.shapes.get(shape, [])
        return len(best) < self.kept_per_shape or -best[0] > least_s

    def keeps(self, estimate_s: float, shape: tuple[object, ...]) -> bool:
        """Returns True if an estimate is among the `kept_per_shape` best so far of its shape (recompute, stages,
        tensors, pools).
        """
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
        """Returns the candidate unchanged, after recording its estimate if it is the best one with enough memory.

        `far_behind` prunes later candidates by that record.
        """
        if self.prunes and one.estimate_s < self.best_estimate_s and self.roomy(one):
            self.best_estimate_s = one.estimate_s
        return one

    def roomy(self, one: Candidate) -> bool:
        """Returns True if the devices could hold all layers if a layer could be divided arbitrarily: a quick test of
        memory.
        """
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
                room += min([free / max(1.0, state + live * held) for free, state, held in worst])
            if room >= self.model.count:
                return True
            at += count
        return False

    def whole_states(self) -> tuple[float, float, float]:
        """Returns the bytes of (weights, gradients, optimizer state) of the whole model, once on all ranks together."""
        pool = next(one.number for one in self.machines.pools if self.tensors(one.number))
        tensor = self.tensors(pool)[0]
        one = self.predict_whole(pool, tensor, self.rows_of(pool, tensor)[0], self.recomputes()[0], 1)[0]
        held, gradients, optimizer = states(one, ((0, self.model.count),), 1, 0)
        return tensor * held, tensor * gradients, tensor * optimizer

    def has_room_for_states(self) -> bool:
        """Returns True if the memory of all devices together, and with offload that of all hosts, can hold weights,
        gradients and optimizer state, however divided.
        """
        pools = self.machines.pools
        if not any(self.tensors(one.number) for one in pools):
            return False
        held, gradients, optimizer = self.whole_states()
        summed = 0.0 if self.model.stack.shards_stages == "chunk" else gradients  # of one chunk at a time, if need be
        on_devices = {"none": held + summed + optimizer, "optimizer": held + summed, "parameters": 0.0}[self.offload]
        on_hosts = {"none": 0.0, "optimizer": gradients + optimizer, "parameters": held + gradients + optimizer}
        return on_devices <= sum(one.devices * one.memory_bytes for one in pools) and (
            on_hosts[self.offload] <= sum(one.devices * one.host_bytes for one in pools)
        )

    def rates(self) -> dict[tuple[str, float], float]:
        """Returns the most rows per second that one device trains, as far as estimated: {(device name, share): rows per
        second}.
        """
        found: dict[tuple[str, float], float] = {}
        for (number, tensor, rows, *_), (one, _, _) in self.each.items():
            pool, total = self.machines.pools[number], one.forward(0, one.count) + one.backward(0, one.count)
            kind = pool.device.name, pool.entry.share
            found[kind] = max(found.get(kind, 0.0), rows / total / tensor)
        return found

    def bound_s(self) -> float:
        """Returns a lower bound of a step's seconds: all devices compute at their best rate all the time and never
        communicate.
        """
        return least_s(self.machines, self.batch, self.rates())


def least_s(machines: Machines, batch: int, rates: dict[tuple[str, float], float]) -> float:
    """Returns the seconds of a step if every device trained at its best rate all the time; 0: the rates are unknown.

    Args:
        rates: rows per second of a device, by (device name, share), as `Estimates.rates` returns them.
    """
    speed = sum(pool.devices * rates.get((pool.device.name, pool.entry.share), 0.0) for pool in machines.pools)
    return batch / speed if speed else 0.0


def peak_rates(model: Model, machines: Machines, batch: int) -> dict[tuple[str, float], float]:
    """Returns an upper bound of the rows per second that a device trains alone, by (device name, share of the
    device).
    """
    one = Estimates(model, machines, batch, Constraints(), Work(math.inf))
    one.ranks = 1  # a rank alone never waits for a slower rank
    for pool in machines.pools:
        for tensor in model.tensor_degrees(pool.number):
            known = model.row_choices(pool.number, tensor)
            for rows in GRID_ROWS if known is None else known:
                if rows <= batch:
                    one.predict_whole(pool.number, tensor, rows, one.recomputes()[0])
    return one.rates()
