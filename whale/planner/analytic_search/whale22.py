"""Implements the load balancing of "Whale: Efficient Giant Model Training over Heterogeneous GPUs" (ATC 2022).

For comparison only (`whale plan --planner`). Formula 1: replicas of a task graph take shares of the batch in proportion
to their devices' FLOP/s; stages take layers so that FLOPs are in proportion. Algorithm 1: while a device's memory does
not suffice, load moves from the device that lacks the most memory to the least loaded device that has room.
Communication is not counted, and memory is taken to be in proportion to load.
"""

from __future__ import annotations

import time
from itertools import accumulate

from cost_model.analytic.evaluate import evaluate
from cost_model.analytic.layer_costs import Model
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.planner.analytic_search.candidates import SearchResult
from whale.planner.analytic_search.estimate import divisors

MICRO_BATCHES_PER_STAGE = 4  # most micro-batches of the pipeline, per stage


def formula_1(load: int, flops_per_s: list[float]) -> list[int]:
    """Divides `load` into integer shares in proportion to FLOP/s; what rounding leaves goes to the largest
    remainders.
    """
    total = sum(flops_per_s)
    exact = [load * f / total for f in flops_per_s]
    shares = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: load - sum(shares)]:
        shares[i] += 1
    return shares


def algorithm_1(
    shares: list[int], flops_per_s: list[float], bytes_per_load: float, fixed_bytes: float, memory_bytes: list[float]
) -> list[int] | None:
    """Moves load, one unit at a time, away from the device that lacks the most memory; None: no device has room.

    Args:
        shares: load of each device, in rows.
        flops_per_s: speed of each device.
        bytes_per_load: memory of one unit of load.
        fixed_bytes: memory that a device needs without any load.
        memory_bytes: memory of each device.
    """
    shares = list(shares)
    while True:
        used = [(fixed_bytes + s * bytes_per_load) / m for s, m in zip(shares, memory_bytes)]
        peak = max(range(len(shares)), key=lambda i: used[i])
        if used[peak] <= 1.0:
            return shares
        room = [
            i for i, m in enumerate(memory_bytes) if i != peak and fixed_bytes + (shares[i] + 1) * bytes_per_load <= m
        ]
        if not room or shares[peak] == 0:
            return None
        idle = min(room, key=lambda i: shares[i] / flops_per_s[i])
        shares[peak] -= 1
        shares[idle] += 1


def plan22(model: Model, machines: Machines, batch: int) -> SearchResult:
    """Plans data parallelism over all devices by Formula 1 and Algorithm 1; if that does not fit, a pipeline.

    Raises:
        PlanError: neither of the two fits.
    """
    started = time.monotonic()
    for strategy in (_data_parallel(model, machines, batch), _pipeline(model, machines, batch)):
        if strategy is None:
            continue
        found = evaluate(model, machines, strategy)
        if found.fits:
            return SearchResult(
                strategy, found, [], [], 1, 1, time.monotonic() - started, 0.0, found.step_s, machines.cluster,
                fastest_s=found.step_s,
            )  # fmt: skip
    raise PlanError(
        "the planner whale22 finds, by the formulas that were published for it, no strategy that fits into memory",
        given=f"{model.name}, a batch of {batch} rows on {machines.devices} devices of {machines.cluster.name}",
        action="leave out --planner: Whale's own planner also tries micro-batches, recompute and tensor parallelism",
    )


def flops_of(model: Model, machines: Machines) -> list[float]:
    """Returns the nominal single-precision FLOP/s of one device of each pool (the paper counts in single precision)."""
    return [p.device.peak_flops_per_s("float32") * p.entry.share for p in machines.pools]


def _data_parallel(model: Model, machines: Machines, batch: int) -> ParallelStrategy | None:
    flops = [f for p, f in zip(machines.pools, flops_of(model, machines)) for _ in range(p.devices)]
    pools = [p.number for p in machines.pools for _ in range(p.devices)]
    memory = [machines.pools[n].memory_bytes for n in pools]
    shares = formula_1(batch, flops)
    one = model.layer_costs(0, 1, 1, "none", False, 1)
    state = (2 * one.element_bytes + one.state_bytes) * (one.parameters[-1] - one.twice)
    found = algorithm_1(shares, flops, one.held_bytes[-1], state, memory)
    if found is None:
        return None
    counted: dict[tuple[int, int], int] = {}
    for pool, rows in zip(pools, found):
        if rows:
            counted[pool, rows] = counted.get((pool, rows), 0) + 1
    parts = tuple(DeviceGroup(pool, 1, count, rows) for (pool, rows), count in counted.items())
    return ParallelStrategy((Stage(((0, model.count),), parts),), 1)


def _pipeline(model: Model, machines: Machines, batch: int) -> ParallelStrategy | None:
    """Plans one stage per device, with layers in proportion to FLOP/s, the devices with the most memory first."""
    order = sorted(
        (p.number for p in machines.pools for _ in range(p.devices)),
        key=lambda n: -machines.pools[n].memory_bytes,
    )[: model.count]
    flops = flops_of(model, machines)
    lengths = formula_1(model.count, [flops[n] for n in order])
    if min(lengths) == 0:
        return None
    ends = list(accumulate(lengths))
    micro_batches = max(d for d in divisors(batch) if d <= MICRO_BATCHES_PER_STAGE * len(order))
    rows = batch // micro_batches
    stages = tuple(
        Stage(((end - n, end),), (DeviceGroup(pool, 1, 1, rows),)) for pool, n, end in zip(order, lengths, ends)
    )
    return ParallelStrategy(stages, micro_batches)
