"""Binds the plan of a described or measured model to a captured program with the same layers, and to ranks.

    bound            binds the strategy; refuses a program with other layers, and features that programs do not support
    find_repetition  finds the repeated blocks in a chain of shapes: the layers of a model
    ranks_of         assigns ranks to each device group of each stage

A described model is a sequence of equal layers. In a program these are the repeated blocks of the chain of weights
(`chain` of `graph_search/pipelines.py`); weights before them belong to the first layer, weights after them to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from cost_model.analytic.transformer import Transformer
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.layout import Shard, divide_evenly
from whale.ir.program import Program
from whale.ir.strategy import DeviceGroup, ParallelStrategy, count_expert_ranks
from whale.passes.analysis.axes import batch_of
from whale.passes.settings import PlanSettings
from whale.planner.analytic_search.layer_profiles import LayerProfile
from whale.planner.graph_search.pipelines import chain, is_of_experts
from whale.planner.report.planfile import PlanFile


class Blocks(NamedTuple):
    """Represents a repetition in a chain of weights: `number` equal blocks of `period` weights each, from weight
    `first` on.
    """

    first: int
    period: int
    number: int


def find_repetition(shapes: Sequence[tuple[int | None, ...]]) -> Blocks:
    """Finds the longest repetition in a chain of weight shapes, with the shortest blocks; one block if nothing repeats.

    Example: shapes a, b, c, b, c, b, c, d give `Blocks(first=1, period=2, number=3)`.
    """
    best = Blocks(0, max(1, len(shapes)), 1)
    longest = 0
    for period in range(1, len(shapes) // 2 + 1):
        run = 0
        for i in range(len(shapes) - period):
            run = run + 1 if shapes[i] == shapes[i + period] else 0
            count = (run + period) // period
            if run >= period and count * period > longest:
                longest = count * period
                best = Blocks(i + 1 - run, period, count)
    return best


def bound(plan: PlanFile, program: Program, settings: PlanSettings, path: str, beside_host: bool) -> ParallelStrategy:
    """Binds the strategy of a described model's plan to a normalised program: to its weights as layers, and to ranks.

    Args:
        path: path of the plan file, for errors.
        beside_host: ranks compute on a device that has memory of its own, as a GPU, so that offload is possible.

    Raises:
        PlanError: the program has other layers or rows, or the plan needs a feature that programs do not support.
    """
    strategy = _with_expert_ranks(plan, program, path)
    if found := "; ".join(plan.problems()):
        raise PlanError(
            "the plan's strategy is not valid for the plan's own model and cluster",
            given=path,
            found=found,
            action="plan the model again: the file was edited, or made by another version",
        )
    for what, action in _unable(strategy, beside_host):
        raise PlanError(
            "the script's program cannot run under the plan of a described model",
            given=f"{path}: {what}",
            action=action,
        )
    firsts = [*_first_weights(plan, program, path), len(chain(program))]
    _compare_rows(plan, program, settings, path)
    ranks = ranks_of(strategy, plan.machines)
    stages = tuple(
        msgspec.structs.replace(
            stage, layers=tuple((firsts[low], firsts[high]) for low, high in stage.layers), bound_ranks=own
        )
        for stage, own in zip(strategy.stages, ranks)
    )
    name = f"as {path} says: {strategy.format_summary()}"
    return msgspec.structs.replace(strategy, stages=stages, shares=_shares(strategy, ranks), name=name)


def _with_expert_ranks(plan: PlanFile, program: Program, path: str) -> ParallelStrategy:
    """Returns the plan's strategy with an explicit expert-parallel degree, after a check that the program has such
    experts.

    Raises:
        PlanError: the degree differs between stages, or the program has no weights for that number of experts.
    """
    strategy, t = plan.strategy, plan.transformer
    if t is None or not t.experts:
        return strategy
    ways = {strategy.expert_ranks or count_expert_ranks(t.experts, stage.replicas) for stage in strategy.stages}
    if len(ways) > 1:
        raise PlanError(
            "the script's program cannot run under the plan of a described model",
            given=f"{path}: expert-parallel degrees {' and '.join(map(str, sorted(ways)))} in different stages",
            expected="one degree in all stages",
            action="plan with --set experts=N",
        )
    counts = [(program.variable_of[h].type.shape or (0,))[0] for h in chain(program) if is_of_experts(program, h)]
    if max(ways) > 1 and set(counts) != {t.experts}:
        given = f"weights for {' and '.join(sorted(map(str, set(counts)))) or 'no'} experts"
        raise _other_model(program, path, given, f"weights of shape [{t.experts}, ., .] for the experts of each layer")
    return msgspec.structs.replace(strategy, expert_ranks=max(ways))


def _shares(strategy: ParallelStrategy, stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns each rank's rows of a step, divided evenly over tensor-parallel ranks; (): all replicas have equal
    rows.
    """
    by_rank: dict[int, int] = {}
    for stage, ranks in zip(strategy.stages, stages):
        rows = (n for p in stage.parts for _ in range(p.replicas) for n in divide_evenly(p.rows, p.tensor))
        by_rank.update(zip(ranks, (n * strategy.micro_batches for n in rows)))
    if all(len({part.rows for part in stage.parts}) == 1 for stage in strategy.stages):
        return ()
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _unable(strategy: ParallelStrategy, beside_host: bool) -> Iterator[tuple[str, str]]:
    """Yields (feature that a program cannot run with, advice on how to plan without it) for a strategy."""
    for number, stage in enumerate(strategy.stages):
        if len(tensors := sorted({part.tensor for part in stage.parts})) > 1:
            yield (
                f"replicas of stage {number} that divide tensors over {' and '.join(map(str, tensors))} ranks",
                "plan with --set tensor=N",
            )
    if strategy.shard_ranks:
        yield f"ZeRO over {strategy.shard_ranks} of the replicas", "plan without shard_ranks: ZeRO over all replicas"
    if strategy.expert_ranks > 1 and any(
        s.replicas // strategy.context % strategy.expert_ranks for s in strategy.stages
    ):
        what = f"expert-parallel degree {strategy.expert_ranks}, which is no divisor of the data-parallel replicas"
        yield f"{what} with context-parallel degree {strategy.context}", "plan with --set context=1"
    if strategy.context > 1 and any(len({part.rows for part in stage.parts}) > 1 for stage in strategy.stages):
        what = f"replicas with unequal rows and context-parallel degree {strategy.context}"
        yield what, "plan with --set context=1"
    if strategy.offload != "none" and not beside_host:
        what = f"offload of {strategy.offload} to the hosts, where ranks compute on the CPU in that memory already"
        yield what, "plan with --set offload=none"


def _first_weights(plan: PlanFile, program: Program, path: str) -> list[int]:
    """Returns, for each layer of the plan's model, the position of its first weight in the program's chain."""
    weights = [program.variable_of[handle] for handle in chain(program)]
    blocks = find_repetition([tuple(v.type.shape or ()) for v in weights])
    before, count, after = _layers(plan.transformer, plan.table)
    first, period, found = blocks
    ends = (first, len(weights) - first - period * found)
    lacking = ends[0] < before or ends[1] < after
    if found != count or lacking:
        given = f"{found} blocks of {period} weights, with {ends[0]} weights before and {ends[1]} after them"
        wanted = f"{count} layers" + f", with {before} before and {after} after them" * bool(before or after)
        raise _other_model(program, path, given, wanted)
    t = plan.transformer
    if t is not None and not t.experts:
        has = sum(prod(n or 0 for n in v.type.shape or ()) for v in weights[first : first + period])
        wanted_elements = t.attention_elements + t.network_elements
        if has != wanted_elements:
            names = ", ".join(v.name for v in weights[first : first + period])
            raise _other_model(
                program,
                path,
                f"{has:,} elements in the weights of the first layer ({names})",
                f"{wanted_elements:,}: hidden={t.hidden}, feed_forward={t.inner}",
            )
    starts = [*range(before), *(first + period * i for i in range(count))]
    starts += range(first + period * count, first + period * count + after)
    return [0, *starts[1:]]


def _layers(transformer: Transformer | None, table: LayerProfile | None) -> tuple[int, int, int]:
    """Returns (layers before the repeated ones, repeated layers, layers after them) of the plan's model."""
    if transformer is not None:
        return 0, transformer.layers, 0
    assert table is not None  # a plan without a model has been refused
    counts = [layer.count for layer in table.layers]
    most = counts.index(max(counts))
    if counts[most] == 1:
        return 0, len(counts), 0
    return sum(counts[:most]), counts[most], sum(counts[most + 1 :])


def _compare_rows(plan: PlanFile, program: Program, settings: PlanSettings, path: str) -> None:
    found = batch_of(program, settings)
    rows = sum(found[0].placement.sizes) if found and isinstance(found[0].placement, Shard) else 0
    if rows != plan.batch:
        raise _other_model(program, path, f"{rows} rows in a batch", f"{plan.batch} rows")


def _other_model(program: Program, path: str, given: str, expected: str) -> PlanError:
    return PlanError(
        "the plan is for another model than the script's",
        op=program.name,
        given=given,
        expected=f"{expected}, as {path} has",
        action="describe the script's model to `whale plan --describe`, or plan the script: `whale plan train.py`",
    )


Device = tuple[int, int, int]  # pool, host of the pool, number on that host


def devices_of(strategy: ParallelStrategy, machines: Machines) -> tuple[tuple[Device, ...], ...]:
    """Returns the devices of each stage, group after group; consecutive devices form a tensor-parallel group."""
    free = {pool.number: [list(range(pool.per_host)) for _ in range(pool.hosts)] for pool in machines.pools}
    taken: dict[tuple[int, int], list[Device]] = {}
    parts = [(s, i, part) for s, stage in enumerate(strategy.stages) for i, part in enumerate(stage.parts)]
    for s, i, part in sorted(parts, key=lambda found: -found[2].tensor):
        taken[s, i] = _take(free[part.pool], part)
    return tuple(
        tuple(device for i in range(len(stage.parts)) for device in taken[s, i])
        for s, stage in enumerate(strategy.stages)
    )


def ranks_of(strategy: ParallelStrategy, machines: Machines) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each stage; ranks are numbered in the order of devices in the cluster file.

    Consecutive ranks of a stage form a tensor-parallel group. Devices that the plan leaves idle have no rank.
    """
    stages = devices_of(strategy, machines)
    by_place = sorted((device for stage in stages for device in stage), key=lambda d: _place(machines, d))
    rank = {device: number for number, device in enumerate(by_place)}
    return tuple(tuple(rank[device] for device in stage) for stage in stages)


def _take(hosts: list[list[int]], part: DeviceGroup) -> list[Device]:
    """Removes the devices of a group from the free ones and returns them as (pool, host, number on that host)."""
    found: list[Device] = []
    for host, left in enumerate(hosts):
        while len(left) >= part.tensor and len(found) < part.ranks:
            found += [(part.pool, host, left.pop(0)) for _ in range(part.tensor)]
    return found


def _place(machines: Machines, device: Device) -> tuple[int, int, int, int]:
    """Returns a sort key that orders devices as in the cluster file: (host entry, host, device entry, number)."""
    number, host, own = device
    pool = machines.pools[number]
    return machines.cluster.hosts.index(pool.host), host, number, own
