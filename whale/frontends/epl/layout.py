"""Decides on which ranks an EPL script's task graphs run, which ranks read batches, and how many micro-batches there
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.errors import PlanError
from whale.runtime.context import BatchReaders


@dataclass(frozen=True)
class AnnotatedGraph:
    """Describes a task graph as the script has annotated it; the input of ``make_layout``.

    Attributes:
      kind: "replicate" or "split".
      count: number of devices of one replica; None if the script does not say.
      inside: index of the task graph around it; None if there is none.
    """

    kind: str
    count: int | None
    inside: int | None = None


@dataclass(frozen=True)
class Layout:
    """Describes how all task graphs of a graph are placed on ranks.

    Attributes:
      batches: which ranks read batches, and how many batches each reads per run.
      replicas: number of copies of the whole model; each has its own part of the global batch.
      accumulated: number of runs whose gradients are accumulated before one update.
      stages: number of task graphs that have ranks of their own; 1 if all share the same ranks.
      paths: for each task graph, the path of the scope in which Whale plans it, such as ``stage_0/split_1``.
      ranks: for each task graph, the ranks of each replica.
    """

    batches: BatchReaders
    replicas: int
    accumulated: int = 1
    stages: int = 1
    paths: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def make_layout(
    graphs: Sequence[AnnotatedGraph],
    size: int,
    colocate: bool,
    micro_batches: int,
    slices: Sequence[Sequence[Sequence[int]]] = (),
) -> Layout:
    """Returns the layout of task graphs, which are given in the order in which the script opened them.

    If several task graphs have devices of their own they become pipeline stages, otherwise all share the same ranks.

    Args:
      size: number of ranks.
      colocate: True to place all task graphs on the same ranks.
      micro_batches: number of micro-batches per update.
      slices: for each task graph, the ranks of each replica, if the script gives them; empty otherwise.

    Raises:
      PlanError: the number of ranks does not fit the task graphs' numbers of devices.
    """
    outer = {k: g for k, g in enumerate(graphs) if g.inside is None}
    apart = [k for k, g in outer.items() if g.kind == "replicate" or g.count is not None]
    if colocate or len(apart) < 2:
        return _make_joint_layout(graphs, size, micro_batches)
    vague = [k for k in outer if k not in apart]
    if vague:
        raise PlanError(
            "an epl.split() without device_count cannot be combined with task graphs that have their own devices",
            given=f"epl.split() as task graph {vague[0]} of {len(outer)}",
            expected="epl.split(device_count), or all task graphs on the same devices",
            action='pass device_count to epl.split, or set "cluster.colocate_split_and_replicate" to True',
        )
    if slices and len(slices) < len(apart):
        raise PlanError(
            "the cluster has fewer slices than the script has task graphs",
            given=f"{len(slices)} slices, {len(apart)} task graphs",
            expected="a slice for each task graph",
            action="add slices to the layout that is passed to epl.Cluster",
        )
    ranks = _list_given_ranks(apart, slices) if slices else _list_ranks_in_order(apart, graphs, size)
    replicas = len(next(iter(ranks.values())))
    prefix = f"pipeline_0(micro_batches={micro_batches})/" if micro_batches > 1 else ""
    paths: dict[int, str] = {}
    plain = all(len(of_one) == 1 for k in apart for of_one in ranks[k]) and not slices
    for number, k in enumerate(apart):
        mine = "" if plain or size == 1 else f"(ranks={'+'.join(str(r) for of_one in ranks[k] for r in of_one)})"
        paths[k] = f"{prefix}stage_{number}{mine}" + (f"/split_{k}" if graphs[k].kind == "split" else "")
    paths.update({k: f"{paths[g.inside]}/split_{k}" for k, g in enumerate(graphs) if g.inside is not None})
    first = ranks[apart[0]]
    readers = tuple(of_one[0] for of_one in first)
    return Layout(BatchReaders(readers, micro_batches, whole=True), replicas, 1, len(apart), paths, ranks)


def make_planned_layout(size: int, stages: int, micro_batches: int) -> Layout:
    """Returns the layout for a script with ``auto.auto_parallel``, whose stages Whale's planner chooses.

    Args:
      size: number of ranks.
      stages: number of stages that the script asks for; values below 1: 1.
      micro_batches: number of micro-batches per run.
    """
    readers = tuple(range(0, size, max(1, stages)))
    return Layout(BatchReaders(readers, micro_batches, whole=True), len(readers))


def _list_given_ranks(
    apart: Sequence[int], slices: Sequence[Sequence[Sequence[int]]]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {k: tuple(map(tuple, slices[number])) for number, k in enumerate(apart)}


def _list_ranks_in_order(
    apart: Sequence[int], graphs: Sequence[AnnotatedGraph], size: int
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Returns the ranks of each replica of each task graph, with consecutive ranks for one replica of the model.

    E.g. task graphs of 1 and 2 devices on 6 ranks: ``{0: ((0,), (3,)), 1: ((1, 2), (4, 5))}``.

    Args:
      apart: indices of the task graphs that have ranks of their own.
      graphs: all task graphs.
      size: number of ranks.
    """
    counts = [graphs[k].count or 1 for k in apart]
    if size == 1:
        return dict.fromkeys(apart, ((0,),))
    if size % sum(counts):
        raise PlanError(
            "the ranks cannot be divided among replicas of the model",
            given=f"{size} ranks; one replica takes {' + '.join(map(str, counts))}",
            expected=f"a multiple of {sum(counts)} ranks",
            action='start another number of ranks, or set "cluster.colocate_split_and_replicate" to True, which '
            'puts all task graphs on the same ranks',
        )  # fmt: skip
    found: dict[int, list[tuple[int, ...]]] = {k: [] for k in apart}
    place = 0
    for _ in range(size // sum(counts)):
        for k, count in zip(apart, counts):
            found[k].append(tuple(range(place, place + count)))
            place += count
    return {k: tuple(ranks) for k, ranks in found.items()}


def _make_joint_layout(graphs: Sequence[AnnotatedGraph], size: int, micro_batches: int) -> Layout:
    """Returns the layout with all task graphs on all ranks: the batch is divided, and under ``epl.split`` tensors
    are.
    """
    copies = [g.count or 1 for g in graphs if g.kind == "replicate" and g.inside is None]
    per_replica = max(copies, default=size if graphs else 1)
    if size > 1 and size % per_replica:
        raise PlanError(
            "the ranks cannot be divided among replicas of the model",
            given=f"{size} ranks; one replica takes {per_replica}",
            expected=f"a multiple of {per_replica} ranks",
            action="start another number of ranks, or change device_count",
        )
    per_replica = min(per_replica, size)
    readers = tuple(range(0, size, per_replica))
    at_once = len([g for g in graphs if g.inside is None]) > 1  # one task graph accumulates gradients over runs
    turns = micro_batches if at_once else 1
    prefix = f"pipeline_0(micro_batches={turns})" if turns > 1 else ""
    paths = {}
    for k, g in enumerate(graphs):
        scope = f"split_{k}" if g.kind == "split" else ""
        paths[k] = "/".join(part for part in (prefix, scope) if part)
    rows = tuple(tuple(range(r, r + per_replica)) for r in readers)
    whole = per_replica > 1 or turns > 1
    return Layout(
        BatchReaders(readers, turns, whole),
        len(readers),
        1 if at_once else micro_batches,
        1,
        paths,
        dict.fromkeys(range(len(graphs)), rows),
    )
