"""Handles rank groups: scopes that name the ranks which divide their batch or their tensors.

All ranks run the whole program; of a tensor that a group divides, the other ranks have parts of size 0. So groups may
have any size and may overlap, and every byte between them is part of the plan. A path names ranks of the run; the
passes that choose layouts see coordinates along one axis (``whale.passes.analysis.axes``), within a stage among its
ranks.

Decisions: 0045, 0082.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from whale.errors import PlanError
from whale.ir.layout import Placement, Shard, divide_evenly, divide_proportionally, find_multiple, shard
from whale.ir.plan import StageGroup
from whale.ir.program import Program
from whale.passes.analysis.scopes import (
    has_split_scopes,
    list_paths,
    ranks_of_scope,
    split_scope,
    with_innermost,
    with_paths,
    with_ranks,
)
from whale.passes.analysis.stages import stage_of


def sizes_within(size: int, ranks: Collection[int] | None, parts: int) -> tuple[int, ...]:
    """Divides ``size`` as evenly as possible over ``ranks`` (None: all ``parts`` of them), with 0 for the others."""
    if ranks is None:
        return divide_evenly(size, parts)
    mine = dict(zip(sorted(ranks), divide_evenly(size, len(ranks))))
    return tuple(mine.get(rank, 0) for rank in range(parts))


def map_named_ranks(program: Program) -> dict[str, frozenset[int]]:
    """Maps the scopes of a program that name ranks to these ranks."""
    found = ((path, ranks_of_scope(path)) for path in sorted(list_paths(program)))
    return {path: ranks for path, ranks in found if ranks is not None}


def brings_rows_together(program: Program) -> bool:
    """Tells whether ranks need rows of others: a scope divides tensors, or names only some of the ranks."""
    return has_split_scopes(program) or bool(map_named_ranks(program))


class RankGroups:
    """The placements of batch rows under ``wh.replica`` scopes, some of which name ranks."""

    def __init__(self, program: Program, parts: int, rows: Mapping[int, Shard]):
        named = map_named_ranks(program) if parts > 1 and rows else {}
        groups = {ranks for path, ranks in named.items() if not split_scope(path)}
        self.active = bool(groups)
        self.rows = {  # size of the batch, or of each of its runs -> group -> rows of each rank
            whole.run: {None: whole.sizes, **{ranks: _share_rows(whole, ranks) for ranks in groups}}
            for _, whole in sorted(rows.items(), reverse=True)
        }

    def place(self, path: str, placement: Placement) -> Placement:
        """Returns the placement that nodes of a scope want for rows that are placed as ``placement``."""
        if not self.active or type(placement) is not Shard or not path or split_scope(path):
            return placement
        for by_group in self.rows.values():
            if times := max(find_multiple(placement.sizes, known) for known in by_group.values()):
                sizes = tuple(times * n for n in by_group[ranks_of_scope(path)])
                return shard(placement.dim, sizes, placement.blocks, placement.halo)
        return placement


def _share_rows(whole: Shard, ranks: Collection[int]) -> tuple[int, ...]:
    """Returns the rows of each rank of a group, in the proportion of all ranks' rows; evenly if the group's ranks have
    none.
    """
    mine = tuple(n if rank in ranks else 0 for rank, n in enumerate(whole.sizes))
    if whole.largest - whole.smallest <= 1 or not any(mine):
        return sizes_within(whole.run, ranks, len(whole.sizes))
    return divide_proportionally(whole.run, mine)


def refuse_rank_groups(program: Program, size: int) -> None:
    """Raises PlanError where scopes name ranks that do not exist."""
    for path, ranks in map_named_ranks(program).items():
        if size > 1 and max(ranks) >= size:
            raise PlanError(
                "a scope is on ranks that do not exist",
                op=path,
                given=f"devices={sorted(ranks)}, {size} ranks",
                expected=f"ranks below {size}",
                action="start more ranks or change devices",
            )


def in_positions(program: Program, groups: Sequence[StageGroup], plan: int) -> Program:
    """Replaces ranks of the run in the scopes of ``program`` by positions in the mesh of their stage group.

    Args:
      plan: number of a plan. Scopes in stages whose groups keep to another one name none.

    Raises:
      PlanError: a scope names no rank of its stage.
    """
    if not map_named_ranks(program):
        return program
    group_of = {stage: group for group in groups for stage in group.stages}

    def locate(path: str) -> str:
        ranks = ranks_of_scope(path)
        if ranks is None:
            return path
        mine = _positions(path, ranks, group_of.get(stage_of(path)), plan)
        return with_innermost(path, lambda part: with_ranks(part, mine))

    return with_paths(program, locate)


def in_mesh_positions(program: Program, order: tuple[int, ...]) -> Program:
    """Replaces ranks of the run in the scopes of ``program`` by positions in the mesh.

    Args:
      order: the rank at each position; (): position and rank are the same number.
    """
    return in_positions(program, (StageGroup("", order, ("",)),), 0) if order else program


def _positions(path: str, ranks: Collection[int], group: StageGroup | None, plan: int) -> tuple[int, ...]:
    """Returns the positions of ranks in their stage group; () where the scope shall name none, or names all of them."""
    mine = tuple(i for i, rank in enumerate(group.ranks) if rank in ranks) if group is not None else ()
    if group is not None and not mine:
        raise PlanError(
            "a scope names no rank of its stage",
            op=path,
            given=f"devices={sorted(ranks)}, stage on {list(group.ranks)}",
            expected="some of the ranks of the stage that the scope is in",
            action="change the devices of the scope, or of the stage",
        )
    return () if group is None or group.plan != plan or len(mine) == len(group.ranks) else mine
