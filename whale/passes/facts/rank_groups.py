"""Groups of ranks: scopes that name the ranks which divide their batch or their tensors.

All ranks run the whole program, as elsewhere; what a group divides has parts of size 0 on the other ranks. So groups
may be of any size, and overlap, and every byte between them is one of the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whale.errors import PlanError
from whale.ir.layout import Placement, Split, even_sizes, proportional_sizes, split
from whale.ir.program import Program
from whale.passes.facts.scopes import all_paths, ranks_of_scope, split_scope


def sizes_within(size: int, ranks: Collection[int] | None, parts: int) -> tuple[int, ...]:
    """``size`` cut as evenly as possible over ``ranks`` (None: all ``parts`` of them), 0 for the others."""
    if ranks is None:
        return even_sizes(size, parts)
    mine = dict(zip(sorted(ranks), even_sizes(size, len(ranks))))
    return tuple(mine.get(rank, 0) for rank in range(parts))


def named_ranks(program: Program) -> dict[str, frozenset[int]]:
    """Scopes of a program that name ranks -> the ranks."""
    found = ((path, ranks_of_scope(path)) for path in sorted(all_paths(program)))
    return {path: ranks for path, ranks in found if ranks is not None}


class RankGroups:
    """How the rows of the batch lie under ``wh.replica`` scopes, where some of these name ranks."""

    def __init__(self, program: Program, parts: int, rows: Mapping[int, Split]):
        named = named_ranks(program) if parts > 1 and rows else {}
        groups = {ranks for path, ranks in named.items() if not split_scope(path)}
        self.active = bool(groups)
        self.rows = {  # size of the batch -> group -> rows of each rank
            size: {None: whole.sizes, **{ranks: _shared(whole, ranks) for ranks in groups}}
            for size, whole in sorted(rows.items(), reverse=True)
        }

    def placed(self, path: str, placement: Placement) -> Placement:
        """Where rows that lie as ``placement`` are wanted by the nodes of a scope."""
        if not self.active or type(placement) is not Split or not path or split_scope(path):
            return placement
        for size, by_group in self.rows.items():
            times = placement.run // size if size else 0
            if times and any(tuple(times * n for n in known) == placement.sizes for known in by_group.values()):
                sizes = tuple(times * n for n in by_group[ranks_of_scope(path)])
                return split(placement.dim, sizes, placement.blocks, placement.halo)
        return placement


def _shared(whole: Split, ranks: Collection[int]) -> tuple[int, ...]:
    """The rows of each rank of a group: in the proportion that all ranks have, where the group's have some."""
    mine = tuple(n if rank in ranks else 0 for rank, n in enumerate(whole.sizes))
    if whole.largest - whole.smallest <= 1 or not any(mine):
        return sizes_within(whole.run, ranks, len(whole.sizes))
    return proportional_sizes(whole.run, mine)


def refuse_rank_groups(program: Program, size: int, unable: Mapping[str, bool]) -> None:
    """Raises PlanError where the groups that scopes name cannot be had.

    Args:
      unable: what they cannot be combined with yet -> whether it is asked for.
    """
    if size == 1:
        return
    for path, ranks in named_ranks(program).items():
        if max(ranks) >= size:
            raise PlanError(
                "a scope is on ranks that do not exist",
                op=path,
                given=f"devices={sorted(ranks)}, {size} ranks",
                expected=f"ranks below {size}",
                action="start more ranks or change devices",
            )
        for what, wanted in unable.items():
            if wanted:
                raise PlanError(
                    "scopes that name some of the ranks cannot be combined with an option yet",
                    op=path,
                    given=f"devices={sorted(ranks)}, {what}",
                    expected="one of the two; wh.stage(devices=...) has ranks of its own",
                    action="leave devices out of the scope, or the option",
                )
