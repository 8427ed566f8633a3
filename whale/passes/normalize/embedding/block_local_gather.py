"""Finds gathers and scatters whose indices stay within blocks: the rows of table and indices fall into groups of equal
size, and indices of a group address only rows of the same group, as in a gather with ``batch_dims``.

Two forms are recognised. A mixture of experts that routes each group of tokens by itself scatters them with indices
whose first column is the number of the group, ``stack([range(groups), expert, slot])``, where the slot is the token's
place in the expert's buffer. The gradient of a gather with ``batch_dims`` sums rows into segments numbered ``index +
group * size``. Both are marked with the number of blocks (``blocks``); sharding rules then split indices and table
between the same blocks, without communication.

Decision: 0067.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from whale.ir.ops import TENSOR_SCATTERS, VIEWS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import require_static_shape

# Op type -> the operand that holds indices of several columns.
_ADDRESSED = {"GatherNd": 1, "ScatterNd": 0, **dict.fromkeys(TENSOR_SCATTERS, 1)}
_MOST_ELEMENTS = 1 << 22
_SEGMENTS = frozenset({"UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"})


def mark_blocks(program: Program) -> Program:
    """Marks gathers, scatters and segment sums whose indices stay within blocks with the number of blocks."""
    marked: dict[str, int] = {}
    for node in program.nodes:
        if node.op in _ADDRESSED:
            indices = node.inputs[_ADDRESSED[node.op]]
            blocks = _count_column_blocks(program, node, indices) or _count_flat_rows(program, node, indices)
        elif node.op in _SEGMENTS:
            blocks = _count_segments(program, node)
        else:
            continue
        if blocks > 1:
            marked[node.name] = blocks
    if not marked:
        return program
    nodes = tuple(n.with_marks(blocks=marked[n.name]) if n.name in marked else n for n in program.nodes)
    return program.replace_nodes(nodes)


def _count_column_blocks(program: Program, node: Node, indices: Ref) -> int:
    """Returns the number of blocks if the first column of the indices is the number of the block; else 0."""
    shape = program.find_type(indices).shape
    table = program.find_type(node.inputs[0]) if node.op != "ScatterNd" else node.outputs[0]
    if not shape or None in shape or len(shape) < 2 or not table.is_static:
        return 0
    made = program.by_name[indices.node]
    while made.op in ("Identity", "Cast") and made.inputs:
        made = program.by_name[made.inputs[0].node]
    first = _value(program, made.inputs[0]) if made.op in ("Pack", "ConcatV2") else None
    if first is None:
        return 0
    if made.op == "Pack":
        if int(made.attrs.get("axis", 0)) not in (-1, len(shape) - 1):
            return 0
    else:
        at = program.const(made.inputs[-1])
        if at is None or int(at) not in (-1, len(shape) - 1) or first.shape[-1] != 1:
            return 0
        first = first[..., 0]
    counted = np.arange(first.shape[0]).reshape((-1,) + (1,) * (first.ndim - 1))
    blocks = (table.shape or (0,))[0]
    return (
        blocks if blocks and shape[0] == blocks and np.array_equal(first, np.broadcast_to(counted, first.shape)) else 0
    )


def _count_flat_rows(program: Program, node: Node, indices: Ref) -> int:
    """Returns the number of blocks if the node is the scatter in the gradient of ``top_k``, else 0.

    Its indices are ``index + row * size``: each row of the flattened operand of ``top_k`` is a block.
    """
    shape, found = program.find_type(indices).shape, node.outputs[0].shape
    if node.op != "ScatterNd" or not shape or None in shape or len(shape) != 2 or shape[1] != 1:
        return 0
    if not found or found[0] is None:
        return 0
    for base, blocks, size in _blocks_added(program, indices, found[0], shape[0] or 0):
        chosen = _look_through_views(program, base)
        if chosen.op == "TopKV2" and (program.find_type(chosen.inputs[0]).shape or (None,))[-1] == size:
            return blocks
    return 0


def _count_segments(program: Program, node: Node) -> int:
    """Returns the number of blocks if the segment ids are ``index + block * size`` of a gather with ``batch_dims``;
    else 0.
    """
    ids, found = program.find_type(node.inputs[1]).shape, node.outputs[0].shape
    if ids is None or len(ids) != 1 or ids[0] is None or not found or found[0] is None:
        return 0
    for base, blocks, size in _blocks_added(program, node.inputs[1], found[0], ids[0]):
        if any(_gathers_within(program, reader, i, blocks, size) for reader, i in program.consumers.get(base, ())):
            return blocks
    return 0


def _blocks_added(program: Program, ref: Ref, positions: int, rows: int) -> Iterator[tuple[Ref, int, int]]:
    """Yields (indices, number of blocks, size of a block) if ``ref`` is computed as ``indices + block * size``, for
    each operand of the sum that may be the indices.

    Args:
      positions: number of rows that indices can address, in all blocks together.
      rows: number of indices in all blocks together.
    """
    added = _look_through_views(program, ref)
    for base, other in (added.inputs, added.inputs[::-1]) if added.op in ("Add", "AddV2") else ():
        steps = _value(program, other)
        if steps is None or steps.ndim < 2:
            continue
        blocks = steps.shape[0]
        if not blocks or positions % blocks or rows % blocks or steps.size != blocks:
            continue
        if np.array_equal(steps.reshape(-1), np.arange(blocks) * (positions // blocks)):
            yield base, blocks, positions // blocks


def _value(program: Program, ref: Ref) -> np.ndarray | None:
    """Returns the value of an integer tensor computed from constants by ranges, casts, reshapes and broadcasts; None if
    other ops are involved.

    Used for tensors that are too large for constant folding.
    """
    node, t = program.by_name[ref.node], program.find_type(ref)
    if node.op == "Const":
        return program.const(ref)
    if not t.is_static or t.elements > _MOST_ELEMENTS or t.dtype not in ("int32", "int64") or not node.inputs:
        return None
    if node.op == "Range":
        bounds = [program.const(r) for r in node.inputs]
        return None if any(b is None for b in bounds) else np.arange(*(int(b) for b in bounds if b is not None))
    of_one = node.op in VIEWS or node.op in ("Cast", "BroadcastTo") or _only_adds_dimensions(program, node)
    if not of_one:
        return None
    value, shape = _value(program, node.inputs[0]), require_static_shape(t)
    if value is None:
        return None
    return np.broadcast_to(value, shape) if node.op == "BroadcastTo" else value.reshape(shape)


def _only_adds_dimensions(program: Program, node: Node) -> bool:
    """Returns True if a node only inserts dimensions, as ``x[:, None]`` does, so that all elements keep their order."""
    before, after = program.find_type(node.inputs[0]), node.outputs[0]
    steps = program.const(node.inputs[3]) if node.op == "StridedSlice" else None
    return steps is not None and bool((steps == 1).all()) and before.is_static and before.elements == after.elements


def _gathers_within(program: Program, reader: Node, operand: int, blocks: int, size: int) -> bool:
    """Returns True if ``reader`` is a gather with ``batch_dims=1`` from ``blocks`` blocks of ``size`` rows, so that
    none of its indices points into another block.

    Args:
      operand: number of the operand of ``reader`` that is the indices in question; only operand 1, the gather's
        indices, counts.
    """
    if reader.op != "GatherV2" or operand != 1 or int(reader.attrs.get("batch_dims", 0)) != 1:
        return False
    return (program.find_type(reader.inputs[0]).shape or ())[:2] == (blocks, size)


def _look_through_views(program: Program, ref: Ref) -> Node:
    node = program.by_name[ref.node]
    while node.op in VIEWS and node.inputs:
        node = program.by_name[node.inputs[0].node]
    return node
