"""Draws the mesh of a plan for its page: a grid of ranks for each stage, rows and columns named by axes.

mesh_of_plan      for a script's plan
mesh_of_strategy  for a described model's plan: replicas by tensor ranks, for each kind of devices of a stage
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whale.ir.mesh import Axis, find_coordinates, format_axes, make_mesh
from whale.ir.plan import Plan, StageGroup
from whale.ir.strategy import ParallelStrategy

CELLS, COLUMNS = 64, 16  # of a grid that are drawn
GRIDS = 16  # drawn


def mesh_of_plan(plan: Plan) -> dict[str, Any]:
    """Returns a grid for each stage group, or one for all ranks: columns along the last axis, rows along the earlier
    ones.
    """
    groups = plan.stage_groups or (StageGroup("", tuple(range(plan.mesh_size)), ()),)
    grids = []
    for index, group in enumerate(groups):
        axes = make_mesh(plan.find_group_plan(group), group.ranks).axes
        name = f"stage {index}: {group.name}" if plan.stage_groups else "all ranks"
        grids.append(_grid(name, [a for a in axes if a.size > 1] or axes[-1:], group.ranks))
    return _card(grids)


def mesh_of_strategy(strategy: ParallelStrategy, names: Sequence[str]) -> dict[str, Any]:
    """Returns a grid for each stage's pool of devices, labelled by the pools' ``names``; ranks are numbered stage by
    stage.
    """
    grids, first = [], 0
    for index, stage in enumerate(strategy.stages):
        for part in stage.parts:
            axes = (Axis("data", part.replicas), Axis("tensor", part.tensor))
            grids.append(_grid(f"stage {index}: {names[part.pool]}", axes, range(first, first + part.ranks)))
            first += part.ranks
    return _card(grids)


def _card(grids: list[dict[str, Any]]) -> dict[str, Any]:
    label = "ranks; those of a row are neighbours along the last axis"
    rest = len(grids) - GRIDS
    return {"label": label + (f"; {rest} more stages are not drawn" if rest > 0 else ""), "grids": grids[:GRIDS]}


def _grid(name: str, axes: Sequence[Axis], ranks: Sequence[int]) -> dict[str, Any]:
    *outer, last = axes
    wide = min(last.size, COLUMNS)
    high = min(len(ranks) // last.size, max(1, CELLS // wide))
    sizes = [a.size for a in outer]
    rows = []
    for row in range(high):
        at = ", ".join(f"{axis.name} {where}" for axis, where in zip(outer, find_coordinates(row, sizes)))
        rows.append((at, [*ranks[row * last.size : row * last.size + wide]]))
    return {
        "name": name,
        "axes": format_axes(axes),
        "last": last.name,
        "columns": wide,
        "rows": rows,
        "more": len(ranks) - high * wide,
    }
