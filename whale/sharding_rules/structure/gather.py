"""Defines sharding rules of gathers and scatters by index.

They can be sharded by the rows of indices, by dimensions that indices do not address, or, if every row comes from one
rank, by the addressed dimension: other ranks then contribute zeros.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import find_numpy_dtype, require_static_shape
from whale.sharding_rules.base import (
    UNCHANGED,
    Local,
    OpView,
    Strategy,
    Window,
    make_labels,
    read_axis,
    write_runs,
    write_term,
    write_terms,
)
from whale.sharding_rules.embedding import Rows
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def gather(op: OpView) -> str:
    """Writes the sharding rule of GatherV2, from ``axis`` and ``batch_dims``.

    The indexed dimension can be sharded if there are no batch dimensions and sizes are known.
    """
    params, indices = op.inputs[0].shape, op.inputs[1].shape
    if params is None or indices is None:
        return REPLICATED
    at = read_axis(op, 2, len(params))
    if at is None:
        return REPLICATED
    batch = _count_batch_dims(op, len(indices))
    b, i = make_labels("b", batch), make_labels("i", len(indices) - batch)
    before, after = make_labels("p", at - batch), make_labels("q", len(params) - at - 1)
    row = "v^" if batch or not op.inputs[1].is_static or not op.outputs[0].is_static else "v+"
    return f"{write_terms([*b, *before, row, *after], [*b, *i])}, . -> {write_term([*b, *before, *i, *after])}"


def _count_batch_dims(op: OpView, rank: int) -> int:
    """Returns how many of the indices' dimensions are batch dimensions that the table shares; a negative ``batch_dims``
    counts from the end.

    Args:
      rank: number of dimensions of the indices.
    """
    batch = int(op.attr("batch_dims", 0))
    return batch + rank if batch < 0 else batch


def _zero_remote_rows(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Zeroes the rows whose index is on another rank, if the indexed dimension is sharded."""
    cut = strategy.inputs[0]
    at = 0
    if op.node.op == "GatherV2" and op.inputs[0].shape is not None:
        found = read_axis(op, 2, len(op.inputs[0].shape))
        at = -1 if found is None else found
    if not isinstance(cut, Shard) or cut.dim != at or op.attr("batch_dims", 0) or isinstance(strategy.inputs[1], Shard):
        return UNCHANGED  # ids are sharded as well only if one rank has the whole table and all ids
    return Local(
        window=Window(1, cut.offset(coordinate), cut.local_size(coordinate), masked=-1, at=at, runs=cut.blocks)
    )


# Scatters that change nothing where they write an element's old value; the other ones add.
_KEEPS = frozenset({"TensorScatterUpdate", "TensorScatterMax", "TensorScatterMin"})


def _count_addressed_dims(op: OpView) -> int | None:
    """Returns how many dimensions an index tuple addresses: the size of the indices' last dimension; None if
    unknown.
    """
    shape = op.inputs[0 if op.node.op == "ScatterNd" else 1].shape
    return shape[-1] if shape else None


def _write_addressed_terms(op: OpView, flag: str = "") -> tuple[str, str] | None:
    """Writes the terms of an op whose indices are positions in several dimensions of a table.

    The dimensions that indices address can be sharded if all sizes are known. If indices stay within blocks, the first
    of them is sharded together with the first dimension of the indices.

    Args:
      flag: the flag of addressed dimensions: "+" if sharding them makes results partial.

    Returns:
      (the table's term; the item of the indices' first dimension with a blank after it, "" if it needs none), or None
        if the number of addressed dimensions is unknown.
    """
    depth = _count_addressed_dims(op)
    if depth is None:
        return None
    known = all(t.is_static for t in (*op.inputs, *op.outputs))
    addressed = [f"v{n}{flag if known else '^'}" for n in range(depth)]
    blocks = _find_block_sizes(op)
    if blocks is None:
        return " ".join([*addressed, "q*"]), ""
    table, rows = (write_runs(n, "b", inner=True) for n in blocks)
    return " ".join([table, *addressed[1:], "q*"]), f"{rows} "


def _find_block_sizes(op: OpView) -> tuple[int, int] | None:
    """Returns (positions of the table, rows of the indices) of each block.

    The result is None if the node's indices are not known to stay within blocks (``Marks.blocks``), at least one block
    for each rank, or if the blocks' sizes are unknown.
    """
    table, indices = (op.outputs[0], op.inputs[0]) if op.node.op == "ScatterNd" else op.inputs[:2]
    sizes = [t.shape[0] for t in (table, indices) if t.shape and t.shape[0] is not None]
    if not op.marks.blocks >= op.parts > 1 or len(sizes) < 2:
        return None
    return sizes[0] // op.marks.blocks, sizes[1] // op.marks.blocks


def _restrict_indices(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Makes indices count from the rank's first position of the sharded dimension, and handles indices on other
    ranks.
    """
    indices, rows = (0, 1) if op.node.op == "ScatterNd" else (1, None if op.node.op == "GatherNd" else 2)
    cut = strategy.outputs[0] if op.node.op != "GatherNd" else strategy.inputs[0]
    depth = _count_addressed_dims(op)
    apart = 0 if op.marks.blocks else None
    if not isinstance(cut, Shard) or depth is None or cut.dim >= depth:
        return Local(blocks=apart) if apart is not None else UNCHANGED
    offset, count = cut.offset(coordinate), cut.local_size(coordinate)
    blocks = _find_block_sizes(op)
    if isinstance(strategy.inputs[indices], Shard) and blocks is not None:
        positions, each = blocks
        own = cut.list_indices(coordinate)[::positions] // positions
        moved = np.repeat((np.arange(len(own)) - own) * positions, each)
        first = np.zeros((len(moved),) + (1,) * (len(op.inputs[indices].shape or ()) - 2) + (depth,))
        first[..., 0] += moved.reshape(-1, *(1,) * (first.ndim - 2))
        first = first.astype(find_numpy_dtype(op.inputs[indices].dtype))
        return Local(blocks=len(own), moved={indices: first})
    whole = Window(indices, offset, count, -1, runs=cut.blocks, column=cut.dim)
    if rows is None:
        return Local(blocks=None if cut.dim else apart, window=whole)
    if cut.dim and _can_stay(op, indices, rows):
        # All indices stay, in the same blocks, so that another axis, or micro-batches, can shard the blocks.
        old = 0 if op.node.op in _KEEPS else None
        return Local(window=replace(whole, masked=rows, old=old, blocks=op.marks.blocks))
    return Local(blocks=apart, window=replace(whole, masked=None, rows=rows))


def _can_stay(op: OpView, indices: int, rows: int) -> bool:
    """Returns True if a scatter on one rank can keep the indices of other ranks, since what it writes for them changes
    nothing.

    Where elements are added it writes zeros, otherwise the old value; the latter is right for an update only if nothing
    else in the block is written at the same place. The result is False if values are whole rows: to drop rows of other
    ranks moves less memory.

    Args:
      indices: number of the operand that has the indices.
      rows: number of the operand that has the values.
    """
    at, elements = op.inputs[indices].shape, op.inputs[rows].shape
    if not op.marks.blocks or at is None or elements is None or len(elements) != len(at) - 1:
        return False
    return (
        op.node.op != "TensorScatterUpdate"
        or math.prod(require_static_shape(op.inputs[indices])[:-1]) == op.marks.blocks
    )


def gather_nd(op: OpView) -> str:
    """Writes the sharding rule of GatherNd, from the index depth and from blocks.

    The index depth is the number of dimensions that an index addresses; blocks are those of ``Marks.blocks``.
    """
    terms = _write_addressed_terms(op, "+")
    return REPLICATED if terms is None else f"{terms[0]}, {terms[1]}i* k^ -> {terms[1]}i* q*"


def resource_gather(op: OpView) -> str:
    """Writes the sharding rule of ResourceGather, from ``batch_dims``.

    Rows can be sharded if there are no batch dimensions and sizes are known.
    """
    if op.inputs[1].shape is None or op.outputs[0].shape is None:
        return REPLICATED
    if not op.attr("batch_dims", 0):
        row = "v+" if op.inputs[1].is_static and op.outputs[0].is_static else "v^"
        return f"{row} q*, i* -> i* q*"
    b = " ".join(f"b{n}^" for n in range(_count_batch_dims(op, len(op.inputs[1].shape))))
    return f"., {b} i* -> {b} i* q*^"


def scatter_nd(op: OpView) -> str:
    """Writes the sharding rule of ScatterNd, from the index depth and from blocks.

    The index depth is the number of dimensions that an index addresses; blocks are those of ``Marks.blocks``.
    """
    terms = _write_addressed_terms(op)
    return REPLICATED if terms is None else f"{terms[1]}i*+ k^, {terms[1]}i*+ q*, [out0] -> {terms[0]}"


def tensor_scatter(op: OpView) -> str:
    """Writes the sharding rule of TensorScatterAdd and others, from the index depth and from blocks.

    The index depth is the number of dimensions that an index addresses; blocks are those of ``Marks.blocks``.
    """
    terms = _write_addressed_terms(op)
    return REPLICATED if terms is None else f"{terms[0]}, {terms[1]}i*^ k^, {terms[1]}i*^ q* -> {terms[0]}"


def tensor_extremum(op: OpView) -> str:
    """Writes the sharding rule of TensorScatterMax and Min, from the index depth and from blocks.

    Other than in TensorScatterAdd, rows of indices can be sharded too, since a maximum may be taken twice.
    """
    terms = _write_addressed_terms(op)
    return REPLICATED if terms is None else f"{terms[0]}, {terms[1]}i*+ k^, {terms[1]}i*+ q* -> {terms[0]}"


def one_hot(op: OpView) -> str:
    """Writes the sharding rule of OneHot, from the axis; the depth can be sharded, except for unsigned indices."""
    indices = op.inputs[0].shape
    if indices is None:
        return REPLICATED
    labels, at = make_labels("i", len(indices)), int(op.attr("axis", -1))
    at = len(indices) if at == -1 else at
    depth = "d^" if op.inputs[0].dtype == "uint8" else "d"  # indices below the first are negative
    return f"{write_term(labels)}, ., ., . -> {write_term([*labels[:at], depth, *labels[at:]])}"


def _restrict_depth(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Makes OneHot's indices count from the rank's first class, with its own depth; indices outside yield zeros."""
    cut, at = strategy.outputs[0], int(op.attr("axis", -1))
    at = len(op.inputs[0].shape or ()) if at == -1 else at
    if not isinstance(cut, Shard) or cut.dim != at:
        return UNCHANGED
    count = cut.local_size(coordinate)
    window = Window(0, cut.offset(coordinate), count, runs=cut.blocks)
    return Local(consts={1: np.array(count, np.int32)}, window=window)


def dynamic_stitch(op: OpView) -> str:
    """Writes the sharding rule of DynamicStitch: the rows that it puts together can be sharded by columns only."""
    count = len(op.inputs) // 2
    indices = [f"i{n}*^" for n in range(count)]
    return f"{', '.join(indices)}, {', '.join(f'{i} q*' for i in indices)} -> n^ q*"


def _list_data_operands(op: OpView) -> str:
    """Returns ``copy`` of DynamicStitch: partial values pass if all data operands are partial."""
    count = len(op.inputs) // 2
    return "&".join(str(count + n) for n in range(count))


RULES = (
    rule("GatherV2", gather, copy="0", local=_zero_remote_rows, routes=Rows(ids=1, table=0)),
    rule("Gather", "v^ q*, i* -> i* q*", copy="0"),
    rule("GatherNd", gather_nd, copy="0", local=_restrict_indices, routes=Rows(ids=1, table=0, columns=True)),
    rule("ResourceGather", resource_gather, local=_zero_remote_rows, routes=Rows(ids=1, table=0)),
    rule("ResourceGatherNd", "., i* k^ -> i* q*^"),
    rule(
        "ScatterNd",
        scatter_nd,
        lin="1",
        local=_restrict_indices,
        produces_any=True,
        routes=Rows(ids=0, values=1, columns=True),
    ),
    rule(
        "TensorScatterAdd TensorScatterSub ScatterNdNonAliasingAdd", tensor_scatter, lin="0&2", local=_restrict_indices
    ),
    rule("TensorScatterUpdate", tensor_scatter, copy="0&2", local=_restrict_indices),
    rule("TensorScatterMax", tensor_extremum, mono="max:0&2", reduce="max", local=_restrict_indices),
    rule("TensorScatterMin", tensor_extremum, mono="min:0&2", reduce="min", local=_restrict_indices),
    rule("OneHot", one_hot, lin="2&3", local=_restrict_depth, produces_any=True),
    rule("DynamicPartition", "i*^ q*, i*^ -> {n^ q*}", copy="0"),
    rule("DynamicStitch ParallelDynamicStitch", dynamic_stitch, copy=_list_data_operands),
    rule("InplaceAdd InplaceSub", "v^ q*, i^, i^ q* -> v^ q*", lin="0&2"),
    rule("InplaceUpdate", "v^ q*, i^, i^ q* -> v^ q*", copy="0&2"),
    rule("UnravelIndex", "i*, . -> k^ i*"),
    rule("LowerBound UpperBound", "b n+, b m -> b m"),
    rule("Unique", REPLICATED),
)
