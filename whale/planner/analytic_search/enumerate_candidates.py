"""Enumerates the strategies that the search estimates: pure ones (each stage on one kind of device) and mixed ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from cost_model.analytic.layer_costs import Model
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, count_expert_ranks
from whale.planner.analytic_search.candidates import Candidate, Constraints
from whale.planner.analytic_search.estimate import Estimates, divisors
from whale.planner.analytic_search.row_shares import row_shares
from whale.planner.analytic_search.work import Work

MOST_SETS = 31  # pure strategies are listed for all sets of pools if there are no more: 31 for five pools
MOST_POOLS = 5  # mixed strategies are listed for all sets of pools if there are no more pools
NEAR = 4  # factor by which tensor degrees of three pools may differ; with more pools they are equal
SOME = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of stages that are tried for any number of layers
SOME_CHUNKS = (1, 2, 3, 4, 6, 8)  # numbers of chunks that are tried if the stages do not divide the layers evenly
LEAST_FILLED = 4  # mixed pipelines with more stages per micro-batch than this are skipped, as mostly idle
ROUGHLY = 0.8  # no real division of rows is faster than this part of the estimate with evenly divided rows


def stage_counts(layers: int, most: int) -> list[int]:
    """Returns the numbers of stages worth trying for a chain of `layers` layers, none larger than `most`.

    A pipeline is as slow as the stage with the most layers, so that of all numbers of stages with the same largest
    stage only the smallest is listed; `most` is listed too. Example: 4 layers, most 4 -> [1, 2, 4], since 3 stages have
    one with 2 layers, as 2 stages do.
    """
    most = min(most, layers)
    return sorted({-(-layers // n) for n in range(1, layers + 1) if -(-layers // n) <= most} | {most})


class Families(Estimates):
    """Enumerates the candidates of both families, `pure` and `enumerate_mixed`, with an estimate of each one's step."""

    def __init__(self, model: Model, machines: Machines, batch: int, limits: Constraints, work: Work) -> None:
        super().__init__(model, machines, batch, limits, work)
        self.hurried = False  # only powers of two of rows, and stages that divide the layers, are listed
        self.stage_counts: dict[tuple[int, bool], list[int]] = {}

    def counts(self, most: int) -> list[int]:
        """Returns the numbers of stages to try, at most ``most``; if the user has fixed the number, only that one or
        none.
        """
        key = min(most, self.model.count)
        if (fixed := self.limits.stages) is not None:
            return [fixed] if fixed <= key else []
        if (key, self.hurried) not in self.stage_counts:
            found = stage_counts(self.model.count, key)
            if self.limits.chunks not in (None, 1):  # with interleaving, the smallest number need not be the best
                found = list(range(1, key + 1))
            elif self.hurried:
                found = [n for n in found if self.model.count % n == 0 or n == key]
                found = sorted({*found, *(n for n in SOME if n <= key)})
            self.stage_counts[key, self.hurried] = found
        return self.stage_counts[key, self.hurried]

    def pure(self) -> Iterator[Candidate]:
        """Yields candidates whose stages lie on one pool each and have the same number of replicas and of rows per
        replica.
        """
        pools, limits = self.machines.pools, self.limits
        sets = [s for n in range(1, len(pools) + 1) for s in itertools.combinations(range(len(pools)), n)]
        if len(sets) > MOST_SETS:  # of many pools: each alone, and all
            sets = [s for s in sets if len(s) in (1, len(pools))]
        for chosen in reversed(sets):  # all pools first
            degrees = [self.tensors(k) for k in chosen]
            if not all(degrees):
                continue
            for tensors in self._combinations(degrees):
                rows_known = [set(self.rows_of(k, t)) for k, t in zip(chosen, tensors)]
                units = [pools[k].tensor_groups(t) for k, t in zip(chosen, tensors)]
                able = [rows for rows in sorted(set.intersection(*rows_known)) if self.batch % rows == 0]
                if limits.micro_batch is not None:
                    able = [rows for rows in able if rows == limits.micro_batch]
                elif self.hurried and limits.micro_batches is None:
                    able = _thin_out(able)
                for rows in able:
                    yield from self._pure_of(chosen, tensors, units, rows)

    def _combinations(self, degrees: list[list[int]]) -> list[tuple[int, ...]]:
        if len(degrees) <= (1 if self.hurried else 2):
            return list(itertools.product(*degrees))
        alike = [(d,) * len(degrees) for d in sorted(set.intersection(*map(set, degrees)))]
        near: list[tuple[int, ...]] = []
        if len(degrees) <= (2 if self.hurried else 3):
            near = [c for c in itertools.product(*degrees) if max(c) <= (2 if self.hurried else NEAR) * min(c)]
        return list(dict.fromkeys(alike + near))

    def _pure_of(
        self, chosen: Sequence[int], tensors: tuple[int, ...], units: list[int], rows: int
    ) -> Iterator[Candidate]:
        limits, count, hidden = self.limits, self.model.count, self.model.stack.overlaps_sends
        widest_tensor = max(tensors)
        priced: dict[tuple[tuple[str, bool], int], tuple[list[float], list[int]]] = {}
        for how, data, spread in itertools.product(
            self.recomputes(), divisors(self.batch // rows), self._expert_degrees()
        ):
            if data > max(units) or self.data not in (None, data) or data % self.replicas_step:
                continue
            widest = count_expert_ranks(self.model.experts, data)
            if spread and widest <= spread:
                continue
            ways = limits.experts or spread or widest
            if (how, ways) not in priced:
                each_s = [self.predict_whole(k, t, rows, how, ways)[2] for k, t in zip(chosen, tensors)]
                priced[how, ways] = each_s, sorted(range(len(chosen)), key=each_s.__getitem__)
            per_layer, order = priced[how, ways]
            micro_batches = self.batch // rows // data
            if limits.micro_batches not in (None, micro_batches):
                continue
            most = [u // data for u in units]
            # The step if all these devices were busy all the time, without a pipeline bubble.
            speed = sum(min(n, count) / c for n, c in zip(most, per_layer))
            if speed and self.far_behind(micro_batches * count / speed):
                continue
            if len(chosen) > 1 and min(most) == 0:
                continue
            settings = self.settings(micro_batches, how)
            if spread:
                settings = msgspec.structs.replace(settings, expert_ranks=spread)
            ranks = [DeviceGroup(k, t, data, rows) for k, t in zip(chosen, tensors)]
            sends_s = max(self.sends_s(pair, how[1]) for pair in zip(ranks, ranks[1:] or ranks))
            after_s: dict[int, tuple[float, float]] = {}
            for stages in self.counts(sum(most)):
                if limits.stages not in (None, stages) or (len(chosen) > 1 and stages <= sum(most) - min(most)):
                    continue
                left, own = stages, [0] * len(chosen)
                for i in order:
                    own[i] = min(left, most[i])
                    left -= own[i]
                if 0 in own:
                    continue
                speed = sum(n / c for n, c in zip(own, per_layer))
                slowest = max(count / speed, min(per_layer) if stages > 1 else 0.0)
                if len(chosen) == 1:
                    slowest = max(slowest, per_layer[0] * -(-count // stages))
                tied_s = self.tied_s(ranks[order[0]], ranks[order[-1]], stages)
                if stages not in after_s:
                    part = DeviceGroup(chosen[0], tensors[0], data, rows)
                    after_s[stages] = self.predict_after_s((part,), how, stages)
                for chunks in self._chunks(stages, micro_batches, len(chosen)):
                    even = chunks > 1 and len(chosen) == 1
                    layers = -(-count // (stages * chunks)) * chunks if even else 0  # of a stage
                    sent_s = 0.0 if stages == 1 or (hidden and chunks > 1) else sends_s * chunks
                    passes_s = max(slowest, per_layer[0] * layers) + sent_s
                    wait_s = (stages - 1) * passes_s / chunks
                    reduce_s, update_s = after_s[stages]
                    estimate_s = micro_batches * passes_s + wait_s + update_s + tied_s
                    shape = how[0], stages.bit_length(), widest_tensor, chosen, spread
                    if not self.may_keep(estimate_s, shape):
                        continue
                    estimate_s += self.predict_reduced_s(reduce_s, slowest, stages, chunks, micro_batches)
                    if self.keeps(estimate_s, shape):
                        kinds = tuple(
                            ((DeviceGroup(chosen[i], tensors[i], data, rows),), own[i])
                            for i in self._order_by_memory(chosen)
                        )
                        yield self.noted(Candidate(estimate_s, kinds, settings, chunks))

    def _expert_degrees(self) -> tuple[int, ...]:
        """Returns the values of `expert_ranks` to try: 0 (experts over as many replicas as possible) and, if the model
        has experts and the user has fixed nothing, 1 (each replica has all experts, no all-to-all).
        """
        return (0, 1) if self.model.experts and self.limits.experts is None and not self.hurried else (0,)

    def _order_by_memory(self, chosen: Sequence[int]) -> list[int]:
        """Returns the indices into `chosen` (pool numbers), largest device memory first: early stages hold the most
        activations.
        """
        return sorted(range(len(chosen)), key=lambda i: -self.machines.pools[chosen[i]].memory_bytes)

    def _chunks(self, stages: int, micro_batches: int, pools: int) -> list[int]:
        fixed, count = self.limits.chunks, self.model.count
        if fixed is not None:
            legal = fixed == 1 or (stages > 1 and stages * fixed <= count)
            return [fixed] if legal else []
        if stages == 1 or micro_batches < stages:
            return [1]
        most = count // stages
        return divisors(most) if count % stages == 0 and pools == 1 else [v for v in SOME_CHUNKS if v <= most]

    def enumerate_mixed(self) -> Iterator[Candidate]:
        """Yields candidates whose stages are all equal, each with replicas on several pools that get rows by their
        speed.
        """
        pools, limits = self.machines.pools, self.limits
        if limits.chunks not in (None, 1):
            return
        sets = [tuple(range(len(pools)))]
        if 2 < len(pools) <= MOST_POOLS:
            sets = [s for n in range(2, len(pools) + 1) for s in itertools.combinations(range(len(pools)), n)]
        wanted = self._replicas_wanted()
        if len(pools) > 1:  # where rows do not divide by the replicas of one pool, some of these have one row more
            sets += [(k,) for k in range(len(pools))]
        for chosen in sets:
            degrees = [self.tensors(k) for k in chosen]
            if not all(degrees):
                continue
            for tensors in self._combinations(degrees):
                units = [pools[k].tensor_groups(t) for k, t in zip(chosen, tensors)]
                if min(units) == 0:
                    continue
                if limits.runnable and len(set(tensors)) > 1:
                    continue
                for stages in self.counts(min(units)):
                    each = [u // stages // self.context * self.context for u in units]
                    if wanted is not None:
                        each = self._share_replicas(wanted, chosen, tensors, each)
                    if all(each):
                        yield from self._enumerate_mixed_of(tuple(zip(chosen, tensors, each)), stages)

    def _replicas_wanted(self) -> int | None:
        """Returns how many replicas of a stage the user's constraints imply; None: they leave the number free."""
        limits = self.limits
        if self.data is None and limits.micro_batch is not None and limits.micro_batches is not None:
            return self.batch // limits.micro_batches // limits.micro_batch
        return self.data

    def _share_replicas(self, wanted: int, chosen: Sequence[int], tensors: Sequence[int], most: list[int]) -> list[int]:
        """Returns how many of `wanted` replicas each chosen pool gets, fastest pool first, up to what each has room
        for.

        Args:
            wanted: replicas of a stage, over all pools.
            chosen: numbers of the pools.
            tensors: tensor-parallel degree on each of these pools.
            most: largest number of replicas of a stage on each of these pools.

        Returns:
            One number per chosen pool; all zeros if the pools together have no room for `wanted` replicas.
        """
        how, left = self.recomputes()[0], wanted
        each = [0] * len(chosen)
        for i in sorted(range(len(chosen)), key=lambda i: self.predict_whole(chosen[i], tensors[i], 1, how)[1]):
            each[i] = min(left, most[i]) // self.context * self.context
            left -= each[i]
        return each if left == 0 else [0] * len(chosen)

    def _enumerate_mixed_of(self, kinds: tuple[tuple[int, int, int], ...], stages: int) -> Iterator[Candidate]:
        limits, replicas = self.limits, sum(k[2] for k in kinds)
        if self.data not in (None, replicas) or replicas % self.replicas_step:
            return
        # Of one of several pools, `pure` lists what divides rows evenly.
        uneven = len(kinds) == 1 < len(self.machines.pools) and self._replicas_wanted() is None
        most = [self.rows_of(pool, tensor)[-1] for pool, tensor, _ in kinds]
        least = max(self.rows_of(pool, tensor)[0] for pool, tensor, _ in kinds)
        for micro_batches in divisors(self.batch):
            rows = self.batch // micro_batches
            if limits.micro_batches not in (None, micro_batches) or rows > sum(k[2] * m for k, m in zip(kinds, most)):
                continue
            left_free = limits.micro_batches is None and limits.stages is None
            if left_free and micro_batches * LEAST_FILLED < stages:
                continue
            if rows < replicas and (micro_batches > 1 or stages > 1):
                continue
            if uneven and rows % replicas == 0:
                continue
            if self.context > 1 and rows % replicas:  # ranks that divide a row's tokens are all alike
                continue
            each = max(1, rows // replicas)  # rows of a replica, if all had as many
            speed = sum(n * each / self.shared_s(pool, tensor, min(each, m), self.recomputes()[0])
                        for (pool, tensor, n), m in zip(kinds, most))  # fmt: skip
            if self.far_behind(ROUGHLY * (micro_batches + stages - 1) * rows / speed / stages):
                continue
            for how, spread in itertools.product(self.recomputes(), self._expert_degrees()):

                def predict_whole_s(
                    pool: int, tensor: int, n: int, how: tuple[str, bool] = how, spread: int = spread
                ) -> float:
                    return self.shared_s(pool, tensor, n, how, spread)

                fixed = rows // replicas if self.context > 1 else limits.micro_batch
                if limits.micro_batch not in (None, fixed):
                    continue
                if fixed is None:
                    parts = row_shares(kinds, rows, predict_whole_s, most)
                else:
                    alike = tuple(DeviceGroup(pool, tensor, n, fixed) for pool, tensor, n in kinds)
                    parts = alike if rows == replicas * fixed and fixed <= min(most) else None
                if parts is None or any(p.rows < least for p in parts):
                    continue
                slowest = max(self.predict_whole(p.pool, p.tensor, p.rows, how, spread)[1] for p in parts) / stages
                reduce_s, update_s = self.predict_after_s(parts, how, stages)
                reduce_s = self.predict_reduced_s(reduce_s, slowest, stages, 1, micro_batches)
                slowest += self.sends_s(parts, how[1]) if stages > 1 else 0.0
                estimate_s = (micro_batches + stages - 1) * slowest + reduce_s + update_s
                estimate_s += self.tied_s(parts[0], parts[0], stages)
                pools = tuple(k[0] for k in kinds)
                shape = how[0], stages.bit_length(), max(k[1] for k in kinds), pools, spread, "mixed"
                if not (self.may_keep(estimate_s, shape) and self.keeps(estimate_s, shape)):
                    continue
                settings = self.settings(micro_batches, how)
                if spread:
                    settings = msgspec.structs.replace(settings, expert_ranks=spread)
                yield self.noted(Candidate(estimate_s, ((parts, stages),), settings))


def _thin_out(rows: Sequence[int]) -> list[int]:
    """Returns the powers of two among ascending numbers of rows, and others that are half, twice, or further from these
    and from each other.
    """
    kept = [n for n in rows if n & (n - 1) == 0]
    for n in rows:
        if all(max(n, other) >= 2 * min(n, other) for other in kept):
            kept.append(n)
    return sorted(kept)
