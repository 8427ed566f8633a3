"""Lists the options of one stage for few devices: sets of devices, tensor-parallel degrees and rows worth trying.

The costs of an option are arrays over all ranges of layers, so that `exact` can evaluate all cuts at once.

Decision: 0050.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

from cost_model.analytic.layer_costs import LayerCosts, costs_of
from cost_model.analytic.memory import part_memory
from cost_model.analytic.stage_costs import reduction_s
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute
from whale.planner.analytic_search.estimate import Estimates
from whale.planner.analytic_search.row_shares import row_shares, variants
from whale.planner.analytic_search.work import COST_S


@dataclass(frozen=True, slots=True)
class StageOption:
    """Holds one choice of devices for a stage, with its costs; matrices are indexed [low, high] for layers low..high-1.

    Attributes:
        used: number of devices of each pool.
        parts: the device groups that these devices form.
        recompute: the stage's kind of recompute.
        forward_s: seconds of a micro-batch's forward pass, without sends.
        seconds: seconds of a micro-batch's forward and backward pass, without sends.
        reduce_s: seconds of the gradient reduction after the last micro-batch.
        live: largest number of micro-batches whose activations fit into memory; 0: the layers do not fit.
        send_s: seconds to send a micro-batch, indexed [pool of the neighbouring stage, cut]; the last row stands for a
            neighbour on several pools.
        head: this stage's index among the rows of a neighbour's `send_s`.
    """

    used: tuple[int, ...]
    parts: tuple[DeviceGroup, ...]
    recompute: Recompute
    forward_s: np.ndarray
    seconds: np.ndarray
    reduce_s: np.ndarray
    live: np.ndarray
    send_s: np.ndarray
    head: int


def stage_options(
    search: Estimates,
    states: list[tuple[int, ...]],
    settings: ParallelStrategy,
    reductions: dict[tuple[DeviceGroup, ...], np.ndarray],
) -> list[StageOption]:
    """Lists the options of a stage: every set of devices, one tensor-parallel degree per pool, and rows by speed.

    Args:
        states: sets of devices, as device counts per pool.
        settings: the strategy's settings, with one kind of recompute for the stage.
        reductions: cache of reduction seconds by device groups, shared between calls.
    """
    rows = search.batch // settings.micro_batches
    how = (settings.recompute, settings.sequence_parallel)
    pools, kept = search.machines.pools, _Options(search, settings, reductions)
    result = []
    for used in states:
        chosen = [k for k, n in enumerate(used) if n]
        if not chosen:
            continue
        best: dict[tuple[DeviceGroup, ...], None] = {}
        for tensors in itertools.product(*(search.tensors(k) for k in chosen)):
            if search.limits.runnable and len(set(tensors)) > 1:
                continue
            if any(used[k] % t for k, t in zip(chosen, tensors)):
                continue
            if any(used[k] // t > pools[k].tensor_groups(t) for k, t in zip(chosen, tensors)):
                continue
            kinds = tuple((k, t, used[k] // t) for k, t in zip(chosen, tensors))
            if sum(k[2] for k in kinds) > rows or search.data not in (None, sum(k[2] for k in kinds)):
                continue
            most = [search.rows_of(k, t)[-1] for k, t, _ in kinds]
            parts = row_shares(kinds, rows, lambda p, t, n: search.predict_whole(p, t, n, how)[1], most)
            if parts is not None:
                known = {p: search.rows_of(p.pool, p.tensor) for one in variants(parts) for p in one}
                fixed = search.limits.micro_batch
                good = (
                    one
                    for one in variants(parts)
                    if all(known[p][0] <= p.rows <= known[p][-1] and fixed in (None, p.rows) for p in one)
                )
                best.update(dict.fromkeys(good))
        search.work.spend(COST_S * (search.model.count + 1) * len(best))
        result += _drop_dominated([kept.option(used, parts) for parts in best])
    return result


class _Options:
    """Creates the options for one number of micro-batches and one kind of recompute; caches intermediate results."""

    def __init__(
        self, search: Estimates, settings: ParallelStrategy, reductions: dict[tuple[DeviceGroup, ...], np.ndarray]
    ) -> None:
        self.search, self.settings, self.reductions = search, settings, reductions
        self.stages = min(search.machines.devices, search.model.count)
        self.lives: dict[tuple[int, int, int, int], np.ndarray] = {}
        self.sends: dict[tuple[int, int, int, int], np.ndarray] = {}

    def option(self, used: tuple[int, ...], parts: tuple[DeviceGroup, ...]) -> StageOption:
        """Returns the option whose `used` devices of each pool form the device groups `parts`, with its costs."""
        replicas = sum(p.replicas for p in parts)
        costs = [costs_of(self.search.model, self.settings, part, self.search.ranks, replicas) for part in parts]
        ahead, back = (
            np.max([_passes_s(c, values(c), host(c)) for c in costs], axis=0)
            for values, host in (
                (lambda c: c.forward_s, lambda c: c.forward_host_s),
                (lambda c: c.backward_s, lambda c: c.backward_host_s),
            )
        )
        return StageOption(
            used,
            parts,
            self.settings.recompute,
            ahead,
            ahead + back,
            self._reduction_s(parts, costs),
            np.min([self._live(part, one, replicas) for part, one in zip(parts, costs)], axis=0),
            np.max([self._send_s(part, sum(p.ranks for p in parts)) for part in parts], axis=0),
            parts[0].pool if len({p.pool for p in parts}) == 1 else len(self.search.machines.pools),
        )

    def _reduction_s(self, parts: tuple[DeviceGroup, ...], costs: list[LayerCosts]) -> np.ndarray:
        """Returns the seconds of the gradient reduction, indexed [low, high]; it depends on the replicas, not on their
        rows.
        """
        count, key = self.search.model.count, tuple(msgspec.structs.replace(p, rows=0) for p in parts)
        if key not in self.reductions:
            found = self.reductions[key] = np.zeros((count + 1, count + 1))
            if sum(p.replicas for p in parts) > 1:
                for low, high in itertools.combinations(range(count + 1), 2):
                    own = [c.parameters_of(((low, high),)) for c in costs]
                    found[low, high] = reduction_s(
                        self.search.model, self.search.machines, parts, own, self.settings.zero
                    )
        return self.reductions[key]

    def _live(self, part: DeviceGroup, one: LayerCosts, replicas: int) -> np.ndarray:
        """Returns how many micro-batches fit into the memory of a device group, indexed [low, high], at most the
        stages' number.
        """
        count, s, key = self.search.model.count, self.settings, (part.pool, part.tensor, part.rows, replicas)
        if key not in self.lives:
            found = self.lives[key] = np.zeros((count + 1, count + 1), dtype=int)
            limit_bytes = self.search.machines.pools[part.pool].memory_bytes
            groups = 2 if self.stages > 1 else 1
            most = min(self.stages, s.micro_batches)
            for low, high in itertools.combinations(range(count + 1), 2):
                used = part_memory(one, ((low, high),), part, replicas, 1, s.zero, groups, s.offload)
                each = one.held_bytes[high] - one.held_bytes[low]
                more = (limit_bytes - used.total_bytes) / max(1.0, each)
                found[low, high] = min(most, 1 + int(more)) if more >= 0 else 0
            found[found == s.micro_batches] = self.stages  # all micro-batches fit, so that memory limits nothing
        return self.lives[key]

    def _send_s(self, part: DeviceGroup, ranks: int) -> np.ndarray:
        """Returns the seconds to send a micro-batch, indexed [receiving pool, cut]; the last row takes the slowest
        path.
        """
        model, machines, key = self.search.model, self.search.machines, (part.pool, part.tensor, part.rows, ranks)
        if key not in self.sends:
            paths = [machines.send_path(part.pool, pool.number, ranks) for pool in machines.pools]
            found = self.sends[key] = np.zeros((len(paths) + 1, model.count + 1))
            for cut in range(1, model.count):
                how = cut, part.tensor, part.rows, self.settings.sequence_parallel
                found[:, cut] = [model.send_s(*how, path) for path in (*paths, min(paths))]
        return self.sends[key]


def _passes_s(one: LayerCosts, device_s: array[float], host_s: array[float]) -> np.ndarray:
    """Returns the seconds of a forward or backward pass, indexed [low, high], as `LayerCosts.forward`; infinite: no
    layers.

    Args:
        device_s: seconds of the kernels, summed over the layers before.
        host_s: seconds of the host's launches, summed over the layers before; a pass takes the longer of the two.
    """
    device, host = np.asarray(device_s), np.asarray(host_s)
    begin_s = np.full((len(device), len(device)), one.begin_s)
    begin_s[0, -1] = 0.0
    found = np.maximum(begin_s + device[None] - device[:, None], one.begin_host_s + host[None] - host[:, None])
    found[np.tril_indices(len(device))] = np.inf
    return found


def _drop_dominated(options: list[StageOption]) -> list[StageOption]:
    """Returns the options without dominated ones: those that another option on the same devices equals or beats in
    every cost, for every range of layers that they can hold.
    """
    kept: list[StageOption] = []
    for one in sorted(options, key=lambda o: float(o.seconds[0, -1])):
        fit = one.live > 0
        if fit.any() and not any(
            (other.live >= one.live).all()
            and (other.seconds[fit] <= one.seconds[fit]).all()
            and (other.forward_s[fit] <= one.forward_s[fit]).all()
            and (other.reduce_s[fit] <= one.reduce_s[fit]).all()
            and (other.send_s <= one.send_s).all()
            for other in kept
        ):
            kept.append(one)
    return kept


def drop_dominated(options: list[StageOption]) -> list[StageOption]:
    """Returns, for each set of devices, the options that no other option (of any kind of recompute) equals or beats."""
    by_use: dict[tuple[int, ...], list[StageOption]] = {}
    for one in options:
        by_use.setdefault(one.used, []).append(one)
    return [one for own in by_use.values() for one in _drop_dominated(own)]
