"""Makes the parts of a plan's page that described models and captured programs share.

* Grids of ranks for each stage, with rows and columns named by mesh axes: ``mesh_of_plan`` for a script's plan, and
  ``mesh_of_strategy`` for a described model's plan (replicas by tensor-parallel ranks, per device group).
* Sentences: what limits a step, and between which seconds it probably lies.
* Lanes for overlapping spans of a timeline, and rounded numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cost_model.graph.predict import Span
from whale.ir.mesh import Axis, find_coordinates, make_mesh
from whale.ir.plan import Plan, StageGroup
from whale.ir.plan_text import format_seconds
from whale.ir.strategy import ParallelStrategy

CELLS, COLUMNS = 64, 16  # most cells and columns of a grid that are drawn
GRIDS = 16  # most grids that are drawn
_LIMITS = {
    "compute": "Computing limits this step: kernels of {where} take {share} of it.",
    "communication": "Communication limits this step: in {share} of it {where} only sends, sums and waits.",
    "bubble": "Waiting limits this step: in {share} of it {where} waits for others; more micro-batches shorten that.",
    "update": "The update limits this step: the optimizer of {where} takes {share} of it.",
    "idle": "Idle time limits this step: in {share} of it {where} neither computes nor communicates.",
}


def mesh_of_plan(plan: Plan, full: Sequence[float | None] = ()) -> dict[str, Any]:
    """Returns a grid of ranks for each stage group of a captured plan; one grid of all ranks if there are no stages.

    The columns of a grid run along one mesh axis: the longer one of two, or the last one of more. Its rows run along
    the other axes.

    Args:
        full: fraction of each rank's memory that is in use, None where unknown; (): unknown.
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
    """Returns a grid of ranks for each device group of a described model's plan; ranks are numbered stage by stage.

    Args:
        names: name of each pool.
        full: fraction of a device's memory in use, for each device group of each stage.
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
    """Returns the data from which the page draws one mesh of ranks as a grid; a row is (label, cells), a cell is (rank,
    its coordinates as text, the fraction of its memory that is in use).
    """
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
    """Formats the range of memory in use over the ranks of a grid, whose cells are too narrow to say it; "":
    unknown.
    """
    known = [part for part in full if part is not None]
    if not known:
        return ""
    least, most = f"{min(known):.0%}", f"{max(known):.0%}"
    return f"; {least if least == most else f'{least} to {most}'} of memory in use"


def describe_limit(
    part: str, seconds: float, step_s: float, where: str, communication_s: float, full: float | None
) -> str:
    """Returns one to three sentences: what takes most of the step, what a faster network could save, how full devices
    are.

    Args:
        part: the part of the step that takes longest, a key of ``_LIMITS``.
        seconds: the seconds of this part.
        where: the stage or rank that takes longest.
        communication_s: seconds of sends and sums that no kernel hides, without waits for others.
        full: fraction of the fullest device's memory that is in use; None: there is no limit.
    """
    found = [_LIMITS[part].format(where=where, share=f"{seconds / step_s:.0%}")]
    if part != "communication":
        saved = communication_s / step_s
        found.append(
            f"A faster network saves at most {saved:.0%}." if saved >= 0.005 else "A faster network saves nothing."
        )
    if full is not None and full >= 0.005:
        found.append(f"The fullest device uses {full:.0%} of its memory.")
    return " ".join(found)


def describe_likely(likely_s: tuple[float, float] | None, compared_with: str) -> str:
    """Describes in words the interval in which a step probably lies, and which comparison that comes from.

    Args:
        likely_s: the interval in seconds; None: nothing was compared.
        compared_with: the kind of steps that predictions were compared with.
    """
    if likely_s is None:
        return "the error of this prediction is unknown: no measured steps of this kind were compared with predictions"
    low, high = map(format_seconds, likely_s)
    return f"likely {low} to {high}, as nine of ten {compared_with}"


def side_by_side(spans: Sequence[Span]) -> tuple[list[tuple[int, Span]], int]:
    """Assigns each span the first lane that is free at its start; returns [(lane, span)] and the number of lanes.

    Args:
        spans: spans ordered by start.
    """
    ends: list[float] = []
    found = []
    for span in spans:
        lane = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = span.end_s
        found.append((lane, span))
    return found, len(ends)


def short(seconds: float) -> float:
    """Rounds a number to six significant digits, to keep the page small."""
    return float(f"{seconds:.6g}")
