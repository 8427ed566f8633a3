"""Draws the mesh of a plan for its page: a grid of ranks for each stage, rows and columns named by axes.

mesh_of_plan      for a script's plan
mesh_of_strategy  for a described model's plan: replicas by tensor ranks, for each kind of devices of a stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whale.ir.mesh import Axis, find_coordinates, make_mesh
from whale.ir.plan import Plan, StageGroup
from whale.ir.strategy import ParallelStrategy

CELLS, COLUMNS = 64, 16  # of a grid that are drawn
GRIDS = 16  # drawn


def mesh_of_plan(plan: Plan, full: Sequence[float | None] = ()) -> dict[str, Any]:
    """Returns a grid for each stage group, or one for all ranks: columns along the longer one of two axes, or the last
    of several, rows along the others.

    Args:
      full: of each rank's memory, the part in use; (): not known.
    """
    groups = plan.stage_groups or (StageGroup("", plan.mesh_ranks, ()),)
    grids = []
    for index, group in enumerate(groups):
        axes = make_mesh(plan.find_group_plan(group), group.ranks).axes
        name = f"stage {index}: {group.name}" if group.stages else group.name or "all ranks"
        found = {rank: full[rank] for rank in group.ranks} if full else {}
        grids.append(_grid(name, [a for a in axes if a.size > 1] or axes[-1:], group.ranks, found))
    return _card(grids, any(f is not None for f in full))


def mesh_of_strategy(strategy: ParallelStrategy, names: Sequence[str], full: Sequence[float]) -> dict[str, Any]:
    """Returns a grid for each stage's pool of devices, labelled by the pools' ``names``; ranks are numbered stage by
    stage.

    Args:
      full: of a device's memory, the part in use, for each part of each stage.
    """
    grids: list[dict[str, Any]] = []
    first = 0
    for index, stage in enumerate(strategy.stages):
        for part in stage.parts:
            axes = (Axis("data", part.replicas), Axis("tensor", part.tensor))
            ranks = range(first, first + part.ranks)
            name = f"stage {index}: {names[part.pool]}"
            grids.append(_grid(name, axes, ranks, dict.fromkeys(ranks, full[len(grids)])))
            first += part.ranks
    return _card(grids, True)


def _card(grids: list[dict[str, Any]], filled: bool) -> dict[str, Any]:
    rest = len(grids) - GRIDS
    more = f"; {rest} more stages are not drawn" if rest > 0 else ""
    return {"label": f"which rank has which part{more}", "grids": grids[:GRIDS], "filled": filled}


def _grid(name: str, axes: Sequence[Axis], ranks: Sequence[int], full: Mapping[int, float | None]) -> dict[str, Any]:
    """Returns a grid: its rows as (label, cells), its cells as (rank, its place on the axes, memory in use)."""
    sizes = [axis.size for axis in axes]
    across = 0 if len(axes) == 2 and sizes[0] > sizes[1] else len(axes) - 1
    down = [at for at in range(len(axes)) if at != across]
    wide = min(sizes[across], COLUMNS)
    high = min(len(ranks) // sizes[across], max(1, CELLS // wide))
    rows = []
    for row in range(high):
        at = dict(zip(down, find_coordinates(row, [sizes[axis] for axis in down])))
        cells = []
        for column in range(wide):
            place = [column if axis == across else at[axis] for axis in range(len(axes))]
            rank = ranks[sum(where * math.prod(sizes[axis + 1 :]) for axis, where in enumerate(place))]
            cells.append((rank, ", ".join(f"{a.name} {where}" for a, where in zip(axes, place)), full.get(rank)))
        rows.append((", ".join(f"{axes[axis].name} {where}" for axis, where in at.items()), cells))
    return {
        "name": name,
        "axes": f"{axes[across].name} {sizes[across]} across"
        + "".join(f", {axes[axis].name} {sizes[axis]} down" for axis in down if sizes[axis] > 1)
        + _format_use([full.get(rank) for rank in ranks]),
        "columns": wide,
        "rows": rows,
        "more": len(ranks) - high * wide,
    }


def _format_use(full: Sequence[float | None]) -> str:
    """Describes how much of their memory the ranks of a grid use: narrow cells have no room for it."""
    known = [part for part in full if part is not None]
    if not known:
        return ""
    least, most = f"{min(known):.0%}", f"{max(known):.0%}"
    return f"; {least if least == most else f'{least} to {most}'} of memory in use"
