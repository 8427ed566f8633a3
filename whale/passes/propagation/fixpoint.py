"""Repeats propagation until batch statistics are consistent: per rank in the forward and backward pass, or global in
both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whale.ir.layout import Placement, Strategy
from whale.ir.program import Program, Ref
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.local_statistics import find_local_statistics, half_local
from whale.passes.propagation.per_rank import Semantics
from whale.passes.propagation.propagate import NOTHING, propagate
from whale.passes.propagation.reference_plan import ReferencePlan


def settle_layouts(
    program: Program,
    parts: int,
    batch: Mapping[str, Placement],
    local_statistics: bool,
    local_streams: bool,
    local: Collection[str] = (),
    fixed: Mapping[str, Strategy] = NOTHING,
    gathered: Collection[str] = (),
    model: ReferencePlan | None = None,
) -> dict[str, GraphLayout]:
    """Returns the layouts of a program (key "") and of each function body that it calls.

    Args:
      local_statistics: batch statistics are of each coordinate's rows, but for those whose gradient is written in
        another form: these are whole.
      local_streams: random tensors with the batch's rows are drawn by each coordinate.
      parts, batch, local, fixed, gathered, model: see ``propagate``.

    Raises:
      PlanError: see ``propagate``.
    """
    whole: set[Ref] = set()
    while True:
        statistics = find_local_statistics(program, whole) if local_statistics and batch else None
        semantics = Semantics(statistics, local_streams)
        layouts = propagate(program, parts, batch, semantics, local, fixed, gathered, model)
        mixed = half_local(program, layouts[""], statistics) if statistics is not None else set()
        if not mixed:
            return layouts
        whole |= mixed
