"""Derives scopes, the ranks that provide batches, and micro-batches from a script's task graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.errors import PlanError
from whale.runtime.context import BatchReaders


@dataclass(frozen=True)
class AnnotatedGraph:
    """A task graph as a script has annotated it.

    Attributes:
      kind: replicate or split.
      count: devices of one replica of it; None: the script does not say.
      inside: the number of the task graph around it; None: it is in none.
    """

    kind: str
    count: int | None
    inside: int | None = None


@dataclass(frozen=True)
class Layout:
    """The joint layout of a graph's task graphs.

    Attributes:
      batches: which ranks provide batches, and how many of them a run takes.
      replicas: copies of the whole model, whose batches make the global one.
      accumulated: number of runs whose gradients are applied in one update.
      stages: task graphs that have ranks of their own.
      paths: for each task graph, the scope in which Whale plans it.
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
    """Returns the layout of task graphs, which are in the order in which they were opened.

    Args:
      size: number of ranks.
      colocate: all task graphs are on the same ranks.
      slices: for each task graph, the ranks of each replica, as the script says; empty: it does not.

    Raises:
      PlanError: the ranks cannot be divided so.
    """
    outer = {k: g for k, g in enumerate(graphs) if g.inside is None}
    apart = [k for k, g in outer.items() if g.kind == "replicate" or g.count is not None]
    if colocate or len(apart) < 2:
        return _make_joint_layout(graphs, size, micro_batches)
    vague = [k for k in outer if k not in apart]
    if vague:
        raise PlanError(
            "a split without device_count is beside task graphs that have devices of their own",
            given=f"task graph {vague[0]}: epl.split() among {len(outer)} task graphs",
            expected="a device_count, or all task graphs on the same devices",
            action='give the split a device_count, or set "cluster.colocate_split_and_replicate" to True',
        )
    if slices and len(slices) < len(apart):
        raise PlanError(
            "the cluster has fewer slices than the script has task graphs",
            given=f"{len(slices)} slices, {len(apart)} task graphs",
            expected="a slice for each task graph",
            action="correct the layout of the cluster",
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
    """Returns the layout for a script whose stages `auto_parallel` chooses: as with stages, a run takes all
    micro-batches.
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
    """Returns the ranks of each task graph: consecutive ranks are one replica, in which each task graph has its own."""
    counts = [graphs[k].count or 1 for k in apart]
    if size == 1:
        return dict.fromkeys(apart, ((0,),))
    if size % sum(counts):
        raise PlanError(
            "the ranks cannot be divided among replicas of the model",
            given=f"{size} ranks; one replica takes {' + '.join(map(str, counts))}",
            expected=f"a multiple of {sum(counts)} ranks",
            action='start another number of ranks, or put task graphs on the same ones with '
            '"cluster.colocate_split_and_replicate"',
        )  # fmt: skip
    found: dict[int, list[tuple[int, ...]]] = {k: [] for k in apart}
    place = 0
    for _ in range(size // sum(counts)):
        for k, count in zip(apart, counts):
            found[k].append(tuple(range(place, place + count)))
            place += count
    return {k: tuple(ranks) for k, ranks in found.items()}


def _make_joint_layout(graphs: Sequence[AnnotatedGraph], size: int, micro_batches: int) -> Layout:
    """Returns the layout with all task graphs on all ranks: batches are divided, and under ``split`` tensors are."""
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
    at_once = len([g for g in graphs if g.inside is None]) > 1  # one task graph adds up over runs of the session
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
