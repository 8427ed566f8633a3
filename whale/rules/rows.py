"""Rows of a table that lies split by rows, exchanged: ids go to who has their rows, and rows come back.

Both the table and the ids are cut. Each rank asks every other one for the ids that it needs of its part, each id once,
and how many these are only the run knows: sizes are exchanged first (``WhaleRouteIds``). Rows come back by an
all-to-all of as many (``WhaleReturnRows``), and what is added to rows goes the same way (``WhaleSendRows``). The other
way to read a table that is cut by rows, zeros for rows of others, moves as many rows to every rank as all have ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whale.ir.layout import Placement, Split, Strategy, split
from whale.ir.values import item_bytes
from whale.rules.base import OpView, Route

_IDS = 1
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def exchanged(op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()) -> list[Strategy]:
    """The ways to read, or add to, a variable cut by rows, whose ids are cut as ``current`` or ``wanted`` say."""
    ids = op.inputs[_IDS]
    adds = len(op.inputs) == 3
    table = current[0]
    if not isinstance(table, Split) or table.dim != 0 or table.blocks != 1 or len(table.sizes) < 2:
        return []
    if not ids.is_static or not ids.elements or op.attr("batch_dims", 0) or ids.dtype not in ("int32", "int64"):
        return []
    values = op.inputs[2] if adds else op.outputs[0]
    if not values.is_static or values.dtype not in _FLOATS:
        return []
    if adds and (values.shape or ())[: len(ids.shape or ())] != ids.shape:
        return []  # one value for all rows
    asked = [current[_IDS], *(current[2:] if adds else wanted[:1])]
    found: dict[Strategy, None] = {}
    for cut in asked:
        if not isinstance(cut, Split) or cut.dim >= len(ids.shape or ()) or cut.halo != (0, 0):
            continue
        if (ids.shape or ())[cut.dim] != cut.extent:
            continue
        why = f"rule {op.node.op}: rows exchanged"
        lies = split(cut.dim, cut.sizes, cut.blocks)
        found[Strategy((table, lies, lies), (), why) if adds else Strategy((table, lies), (lies,), why)] = None
    return list(found)


def is_exchanged(strategy: Strategy) -> bool:
    """Whether a strategy of a lookup, or of an addition to rows, is one of ``exchanged``."""
    return isinstance(strategy.inputs[0], Split) and isinstance(strategy.inputs[_IDS], Split)


def route(op: OpView, strategy: Strategy) -> Route:
    """How the ids find their owners: the first row of each rank, and the number of rows."""
    table = strategy.inputs[0]
    assert isinstance(table, Split), strategy
    return Route((*table.starts, table.run), values=2 if len(op.inputs) == 3 else None)


def exchanged_bytes(op: OpView, strategy: Strategy) -> int:
    """Bytes that all ranks together are expected to move, with ids drawn evenly: each rank asks once for an id.

    Ids travel where rows are read; what is added to rows goes where they went.
    """
    if not is_exchanged(strategy):
        return 0
    table, ids = strategy.inputs[0], op.inputs[_IDS]
    assert isinstance(table, Split), strategy
    values = op.inputs[2] if len(op.inputs) == 3 else op.outputs[0]
    width = values.bytes // ids.elements
    cut = strategy.inputs[_IDS]
    assert isinstance(cut, Split), strategy
    rows, moved = table.run, 0.0
    for coordinate, own in enumerate(table.sizes):
        count = ids.elements * cut.local(coordinate) // max(1, cut.extent)
        once = -rows * math.expm1(-count / rows) if rows else 0.0
        moved += once * (rows - own) / rows if rows else 0.0
    return round(moved * (width + (item_bytes(ids.dtype) if len(op.inputs) == 2 else 0)))
