"""Handles rank groups: scopes that name the ranks which shard their batch rows or tensors.

All ranks run the whole program; of a tensor that a group shards, the other ranks have parts of size 0. So groups may
have any size and may overlap, and every byte between them is part of the plan. A scope's path names ranks of the run;
passes that choose layouts see coordinates along one mesh axis instead (``whale.passes.analysis.axes``), and within a
pipeline stage positions among its ranks.

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
    """Divides ``size`` as evenly as possible over ``ranks``, with 0 for the others: ``sizes_within(5, {1, 2}, 4)`` is
    (0, 3, 2, 0).

    Args:
      ranks: None: all ``parts`` ranks.
    """
    if ranks is None:
        return divide_evenly(size, parts)
    mine = dict(zip(sorted(ranks), divide_evenly(size, len(ranks))))
    return tuple(mine.get(rank, 0) for rank in range(parts))


def map_named_ranks(program: Program) -> dict[str, frozenset[int]]:
    """Maps the paths of scopes that name ranks, anywhere in the program, to these ranks."""
    found = ((path, ranks_of_scope(path)) for path in sorted(list_paths(program)))
    return {path: ranks for path, ranks in found if ranks is not None}


def brings_rows_together(program: Program) -> bool:
    """Returns True if ranks need rows of other ranks: a scope shards tensors, or names only some of the ranks."""
    return has_split_scopes(program) or bool(map_named_ranks(program))


class RankGroups:
    """Knows how batch rows are sharded under ``wh.replica`` scopes that name ranks."""

    def __init__(self, program: Program, parts: int, rows: Mapping[int, Shard]):
        named = map_named_ranks(program) if parts > 1 and rows else {}
        groups = {ranks for path, ranks in named.items() if not split_scope(path)}
        self.active = bool(groups)
        self.rows = {  # size of the batch, or of each of its runs -> group -> rows of each rank
            whole.run: {None: whole.sizes, **{ranks: _share_rows(whole, ranks) for ranks in groups}}
            for _, whole in sorted(rows.items(), reverse=True)
        }

    def place(self, path: str, placement: Placement) -> Placement:
        """Returns the placement that nodes under scope ``path`` want for a tensor with the batch's rows; other
        placements are returned unchanged.
        """
        if not self.active or type(placement) is not Shard or not path or split_scope(path):
            return placement
        for by_group in self.rows.values():
            if times := max(find_multiple(placement.sizes, known) for known in by_group.values()):
                sizes = tuple(times * n for n in by_group[ranks_of_scope(path)])
                return shard(placement.dim, sizes, placement.blocks, placement.halo)
        return placement


def _share_rows(whole: Shard, ranks: Collection[int]) -> tuple[int, ...]:
    """Returns the number of rows of each rank if only ``ranks`` compute the batch: in proportion to their usual rows,
    or evenly if they have none, or if all ranks have the same number (or one more).

    Args:
      whole: how the batch is sharded over all ranks.
    """
    mine = tuple(n if rank in ranks else 0 for rank, n in enumerate(whole.sizes))
    if whole.largest - whole.smallest <= 1 or not any(mine):
        return sizes_within(whole.run, ranks, len(whole.sizes))
    return divide_proportionally(whole.run, mine)


def refuse_rank_groups(program: Program, size: int) -> None:
    """Checks that all ranks that scopes name exist.

    Raises:
      PlanError: a scope names a rank of ``size`` or more.
    """
    for path, ranks in map_named_ranks(program).items():
        if size > 1 and max(ranks) >= size:
            raise PlanError(
                "a scope is on ranks that do not exist",
                op=path,
                given=f"devices={sorted(ranks)}, {size} ranks",
                expected=f"ranks below {size}",
                action="start more ranks, or change `devices=` of the scope",
            )


def in_positions(program: Program, groups: Sequence[StageGroup], plan: int) -> Program:
    """Replaces the ranks that scopes name by positions in the mesh of their stage group.

    Args:
      plan: number of the plan that is made. Scopes in stages whose group follows another plan lose their ranks.

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
    """Replaces the ranks that scopes name by positions in the mesh, in a program without stages.

    Args:
      order: the rank at each position; (): position and rank are the same number.
    """
    return in_positions(program, (StageGroup("", order, ("",)),), 0) if order else program


def _positions(path: str, ranks: Collection[int], group: StageGroup | None, plan: int) -> tuple[int, ...]:
    """Returns the positions of ``ranks`` in their stage group; () if the scope should name none: the group follows
    another plan, or all its ranks are named.

    Raises:
      PlanError: none of the ranks is in the group.
    """
    mine = tuple(i for i, rank in enumerate(group.ranks) if rank in ranks) if group is not None else ()
    if group is not None and not mine:
        raise PlanError(
            "a scope names no rank of its stage",
            op=path,
            given=f"devices={sorted(ranks)}, stage on {list(group.ranks)}",
            expected="some of the ranks of the stage that the scope is in",
            action="change `devices=` of the scope, or of its wh.stage",
        )
    return () if group is None or group.plan != plan or len(mine) == len(group.ranks) else mine
