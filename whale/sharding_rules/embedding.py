"""Defines exchanges of table rows: ids go to the ranks that hold their rows, and rows come back.

Both the table's rows and the ids are sharded. Each rank asks every other one for the rows of its own ids, each id once.
How many these are is known only at run time, so sizes are exchanged first (``WhaleRouteIds``). Rows come back by an
all-to-all (``WhaleReturnRows``), and values to add to rows go the other way (``WhaleSendRows``). The alternative, to
read zeros for other ranks' rows and all-reduce the results, would send to every rank the rows of all ranks' ids.

The table may be a variable, a tensor (such as the experts' results for their tokens), or the op's result (such as the
experts' inputs, into which a scatter puts tokens). An id may be a position in several dimensions of the table. One of
these, but not the sharded one, may have a size known only at run time (as many tokens as the fullest expert has). Rows
are then numbered as if that size were very large, and the rank that has the rows converts the numbers.

``WhaleSumsById`` turns ids and rows into the unique ids and the sum of each id's rows, so that an optimizer can update
each row once, where the table's rows are. How many ids each rank gets is known only at run time. Such tensors have the
placement of the table, which tells who has the row of which id, and their ids count from the owner's first row. Only
nodes with the mark ``owned_rows`` read them.

If one rank has the whole table and all its ids, nothing is exchanged.

Decision: 0087.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whale.ir.layout import B, Placement, Shard, Strategy, shard
from whale.ir.program import Node
from whale.ir.values import TensorType, count_item_bytes, require_static_shape
from whale.sharding_rules.base import OpView, Route

# The op of unique ids and the sum of each id's rows; it has no kernel (see ``whale.partition.embedding``).
SUMS_BY_ID = "WhaleSumsById"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MOST_ROWS = {"int32": 1 << 31, "int64": 1 << 63}
_SOME_ROWS = (1 << 31) - 1  # upper bound of row numbers of a table of which one size is known only at run time


@dataclass(frozen=True, slots=True)
class Rows:
    """Tells which operands of an op are a table, ids of its rows, and a value per id. Rules pass it as ``routes``.

    Attributes:
      ids: number of the operand that has the ids.
      table: number of the operand that is the table; None: the result is the table (a scatter).
      values: number of the operand that is added to rows; None: rows are read, and are the result (a lookup).
      columns: True if each id is a position in several dimensions of the table, stored along the ids' last dimension.
      once: True for ``WhaleSumsById``, whose results are the unique ids and the sum of each id's values, on the ranks
        that hold the table's rows.
    """

    ids: int
    table: int | None = None
    values: int | None = None
    columns: bool = False
    once: bool = False

    def table_type(self, op: OpView) -> TensorType:
        """Returns the global type of the table."""
        return op.outputs[0] if self.table is None else op.inputs[self.table]

    def values_type(self, op: OpView) -> TensorType:
        """Returns the global type of the tensor with a value per id: the operand to add, or the result of a lookup."""
        return op.outputs[0] if self.values is None else op.inputs[self.values]

    def placements(self, strategy: Strategy) -> tuple[Placement, Placement]:
        """Returns (placement of the table, placement of the ids) under ``strategy``."""
        table = strategy.outputs[0] if self.table is None else strategy.inputs[self.table]
        return table, strategy.inputs[self.ids]


def list_exchanged_strategies(
    op: OpView, rows: Rows, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
) -> list[Strategy]:
    """Returns the strategies in which table and ids are both sharded, so that the op exchanges rows by their ids.

    Args:
      current: present placements of the operands.
      wanted: preferred placements of the outputs.
    """
    result = wanted[0] if wanted else None
    table = result if rows.table is None else current[rows.table]
    if not isinstance(table, Shard) or not is_table_cut_by_ids(op, rows, table) or not can_run(op, rows):
        return []
    lead = find_id_dims(op, rows)
    found: dict[Strategy, None] = {}
    for cut in (current[rows.ids], result if rows.values is None else current[rows.values]):
        if not isinstance(cut, Shard) or cut.dim >= len(lead) or cut.halo != (0, 0) or lead[cut.dim] != cut.extent:
            continue
        lies = shard(cut.dim, cut.sizes, cut.blocks)
        inputs: list[Placement] = [B] * len(op.inputs)
        inputs[rows.ids] = lies
        if rows.table is not None:
            inputs[rows.table] = table
        if rows.values is not None:
            inputs[rows.values] = lies
        outputs = (table if rows.table is None else lies,) * len(op.outputs)
        found[Strategy(tuple(inputs), outputs, f"rule {op.node.op}: rows exchanged")] = None
    return list(found)


def is_exchanged(op: OpView, rows: Rows, strategy: Strategy) -> bool:
    """Returns True if ``strategy`` makes the op exchange rows, as those of ``list_exchanged_strategies`` do."""
    table, ids = rows.placements(strategy)
    if not isinstance(ids, Shard) or not isinstance(table, Shard) or is_local(rows, strategy):
        return False
    return is_table_cut_by_ids(op, rows, table) and can_run(op, rows)


def is_local(rows: Rows, strategy: Strategy) -> bool:
    """Returns True if one rank has the whole table and all its ids, so that only this rank runs the op and nothing is
    moved.
    """
    table, ids = rows.placements(strategy)
    if not isinstance(ids, Shard) or not isinstance(table, Shard) or rows.columns or len(table.sizes) < 2:
        return False
    return len(table.holders) == 1 and table.holders == ids.holders


def list_owner_strategies(
    op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
) -> list[Strategy]:
    """Returns the strategies in which rows of unique ids are processed on the ranks that hold the table's rows.

    Only ops with the mark ``owned_rows`` have any.
    """
    if not op.marks.owned_rows:
        return []
    at = [_has_owned_rows(t) for t in (*op.inputs, *op.outputs)]
    tables = {
        lies: None
        for has, lies in zip(at, (*current, *(wanted or (None,) * len(op.outputs))))
        if has and isinstance(lies, Shard) and lies.dim == 0 and lies.blocks == 1 and lies.halo == (0, 0)
    }
    found = []
    for table in tables:
        lie = [table if has else B for has in at]
        inputs, outputs = tuple(lie[: len(op.inputs)]), tuple(lie[len(op.inputs) :])
        found.append(Strategy(inputs, outputs, f"rule {op.node.op}: rows of ids, where the table has them"))
    return found


def is_owned(op: OpView, strategy: Strategy) -> bool:
    """Returns True if ``strategy`` is one of ``list_owner_strategies``."""
    ways = list_owner_strategies(op, strategy.inputs, strategy.outputs)
    return any((way.inputs, way.outputs) == (strategy.inputs, strategy.outputs) for way in ways)


def is_with_owners(node: Node, index: int, placement: Placement) -> bool:
    """Returns True if result ``index`` of a node has one row per unique id, and each row is on the rank that holds the
    id's table row.

    Such a result cannot be resharded, since the number of rows on each rank is known only at run time.
    """
    if not isinstance(placement, Shard) or placement.dim != 0:
        return False
    return (node.marks.owned_rows or node.op == SUMS_BY_ID) and _has_owned_rows(node.outputs[index])


def _has_owned_rows(t: TensorType) -> bool:
    """Returns True if a tensor of this type follows the rows of a table, in an op with the mark ``owned_rows``.

    That is a variable's handle, or a tensor with one row per unique id, so that its number of rows is unknown.
    """
    return t.dtype == "resource" or (t.shape is not None and t.shape[:1] == (None,))


def make_route(op: OpView, rows: Rows, strategy: Strategy) -> Route:
    """Returns the route by which ids are sent to the ranks that hold their rows, for a strategy that exchanges rows."""
    table, _ = rows.placements(strategy)
    assert isinstance(table, Shard), strategy
    if not rows.columns:
        return Route((*table.starts, table.run), rows.ids, rows.table, rows.values)
    sizes, each = find_addressed_sizes(op, rows), count_rows_per_index(op, rows, table)
    order = [table.dim, *(n for n in range(len(sizes)) if n != table.dim)]
    strides = tuple(math.prod(sizes[m] for m in order[order.index(n) + 1 :]) for n in range(len(sizes)))
    starts = tuple(first * each for first in (*table.starts, table.run))
    shape = rows.table_type(op).shape or ()
    unknown = shape.index(None) if None in shape else None
    return Route(starts, rows.ids, rows.table, rows.values, strides, table.dim, unknown)


def count_exchanged_bytes(op: OpView, rows: Rows, strategy: Strategy) -> int:
    """Returns the bytes that all ranks together are expected to move for an op; 0 if ``strategy`` exchanges no rows.

    Ids are assumed to be uniformly distributed, and each rank asks for an id only once. Lookups send ids and rows;
    updates send rows only, since they use the ids that a lookup has sent.
    """
    if not is_exchanged(op, rows, strategy):
        return 0
    (table, cut), ids = rows.placements(strategy), op.inputs[rows.ids]
    assert isinstance(table, Shard) and isinstance(cut, Shard), strategy
    each, depth = count_rows_per_index(op, rows, table), count_addressed_dims(op, rows)
    many = ids.elements // depth
    width = rows.values_type(op).bytes // many
    count_of_rows, moved = table.run * each, 0.0
    for coordinate, own in enumerate(table.sizes):
        count = many * cut.local_size(coordinate) // max(1, cut.extent)
        once = -count_of_rows * math.expm1(-count / count_of_rows) if count_of_rows else 0.0
        moved += once * (table.run - own) / table.run if table.run else 0.0
    return round(moved * (width + (count_item_bytes(ids.dtype) if rows.values is None else 0)))


def is_table_cut_by_ids(op: OpView, rows: Rows, table: Shard) -> bool:
    """Returns True if ``table`` shards a dimension that the ids address."""
    if table.blocks > 1 or len(table.sizes) < 2 or table.dim >= count_addressed_dims(op, rows):
        return False
    return rows.once or (rows.table_type(op).shape or ())[table.dim : table.dim + 1] != (None,)


def can_run(op: OpView, rows: Rows) -> bool:
    """Returns True if the op's rows can be exchanged: static sizes, values of floating type, ids of arbitrary rows."""
    ids, values = op.inputs[rows.ids], rows.values_type(op)
    if not ids.is_static or not ids.elements or not values.is_static or values.dtype not in _FLOATS:
        return False
    if ids.dtype not in _MOST_ROWS or op.attr("batch_dims", 0) or op.marks.blocks >= op.parts > 1:
        return False
    if not rows.once and rows.table is not None and not all(t.is_static for t in op.outputs):
        return False
    if op.node.op == "GatherV2":
        axis = op.const(2)
        if axis is None or int(axis) != 0 or not op.inputs[0].is_static:
            return False
    if rows.columns:
        shape, depth = rows.table_type(op).shape, count_addressed_dims(op, rows)
        if shape is None or not 0 < depth <= len(shape) or shape[:depth].count(None) > 1 or None in shape[depth:]:
            return False
        if math.prod(find_addressed_sizes(op, rows)) >= _MOST_ROWS[ids.dtype]:
            return False
    # There has to be a value for each id; one value for all rows would have no dimension of the ids.
    return require_static_shape(values)[: len(find_id_dims(op, rows))] == find_id_dims(op, rows)


def find_id_dims(op: OpView, rows: Rows) -> tuple[int, ...]:
    """Returns the shape of the ids, without the last dimension if its elements together form one id."""
    shape = require_static_shape(op.inputs[rows.ids])
    return shape[:-1] if rows.columns else shape


def count_addressed_dims(op: OpView, rows: Rows) -> int:
    """Returns the number of dimensions of the table that one id addresses."""
    return (op.inputs[rows.ids].shape or (0,))[-1] or 0 if rows.columns else 1


def find_addressed_sizes(op: OpView, rows: Rows) -> tuple[int, ...]:
    """Returns the sizes of the table's dimensions that an id with columns addresses.

    A size that is known only at run time is replaced by the largest one for which row numbers still fit.
    """
    shape = (rows.table_type(op).shape or ())[: count_addressed_dims(op, rows)]
    most = _SOME_ROWS // max(1, math.prod(n for n in shape if n is not None))
    return tuple(most if n is None else n for n in shape)


def count_rows_per_index(op: OpView, rows: Rows, table: Shard) -> int:
    """Returns the number of table rows for each index of the sharded dimension."""
    return math.prod(n for i, n in enumerate(find_addressed_sizes(op, rows)) if i != table.dim) if rows.columns else 1
