"""Computes the bytes that a communication op has to move between ranks, independently of its implementation.

These are the logical bytes of plans, of predictions and of whale_ops' counters (its `logical_bytes`).

    collective_bytes   of all ranks of a collective together, from the tensor's bytes
    rank_bytes         of one rank, from its node
    bytes_on_wire      of a tensor that is rounded before it is sent
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.ops import ALL_REDUCES, ROW_EXCHANGES
from whale.ir.program import Node
from whale.ir.values import TensorType, count_item_bytes


def count_collective_bytes(op: str, tensor_bytes: int, ranks: int) -> int:
    """Returns the bytes that all of ``ranks`` send in a collective over a tensor of ``tensor_bytes``, however it is
    divided.

    2(p-1)T for an all-reduce; (p-1)T for an all-gather, a reduce-scatter or a broadcast: every rank but one has to get
    each element, or its part of the sum of it.
    """
    return (2 if op in ALL_REDUCES else 1) * (ranks - 1) * tensor_bytes


def count_wire_bytes(tensor_bytes: int, dtype: str, wire_dtype: str) -> int:
    """Returns the bytes of a tensor that is sent as ``wire_dtype``; with "", its own bytes."""
    return tensor_bytes // count_item_bytes(dtype) * count_item_bytes(wire_dtype) if wire_dtype else tensor_bytes


def count_operand_bytes(node: Node, inputs: Sequence[TensorType]) -> int:
    """Returns the bytes of the tensors that a rank passes to a communication op, as they are sent.

    Args:
      inputs: the operands' types on this rank.
    """
    wire_dtype = str(node.attrs.get("wire_dtype", ""))
    return sum(count_wire_bytes(t.bytes, t.dtype, wire_dtype) for t in inputs if t.dtype != "resource")


def count_rank_bytes(node: Node, inputs: Sequence[TensorType], place: int, ranks: int) -> int:
    """Returns the bytes that one rank sends in a communication op; the ranks' bytes add up to
    ``count_collective_bytes``.

    Args:
      inputs: the operands' types on this rank.
      place: of this rank in its group, of ``ranks``; a message has neither.
    """
    sent = count_operand_bytes(node, inputs)
    if node.op == "WhaleSend":
        return sent
    if node.op == "WhaleRecv":
        return 0
    if node.op in ALL_REDUCES:
        total = count_collective_bytes(node.op, sent, ranks)
        return total // ranks + (place < total % ranks)
    if node.op == "WhaleAllGather":  # its part goes to all others
        return count_collective_bytes(node.op, sent, ranks)
    if node.op == "WhaleReduceScatter":  # all others' parts of what it keeps
        return count_collective_bytes(node.op, node.outputs[0].bytes, ranks)
    if node.op == "WhaleAllToAll":  # all but what it keeps
        sizes = node.attrs["split_sizes"]
        return sent - (sent * sizes[place] // sum(sizes) if sum(sizes) else 0)
    if node.op in ROW_EXCHANGES:
        return node.marks.expected_bytes
    assert node.op == "WhaleBroadcast", node.op
    whole = sum(t.bytes for t in node.outputs)
    return count_collective_bytes(node.op, whole, ranks) if place == int(node.attrs["root"]) else 0
