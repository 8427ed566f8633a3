"""Computes the bytes that one communication op of a rank's program moves and allocates, from its node alone.

Counts are those of whale_ops' counters (see whale.ir.layout), so a run can be compared with them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale.ir.layout import count_operand_bytes, count_rank_bytes
from whale.ir.ops import ALL_REDUCES, POINT_TO_POINT, ROW_EXCHANGES
from whale.ir.program import Node
from whale.ir.values import TensorType


@dataclass(frozen=True, slots=True)
class Exchange:
    """Represents one communication op on one rank.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, or point_to_point.
        key: identifies the exchange; equal on all participating ranks.
        ranks: the participating ranks, in the order of the group.
        tensor_bytes: bytes of the whole tensor that is reduced, gathered, scattered, or sent.
        logical_bytes: this rank's part of the bytes that have to move.
        scratch_bytes: sizes of the buffers that the op allocates for packing while it runs.
        staging_bytes: memory that the op keeps from step to step.
        through: the library that exchanges between devices, as ``communication.backend`` names it; "": through the
            host.
    """

    kind: str
    key: str
    ranks: tuple[int, ...]
    tensor_bytes: int
    logical_bytes: int
    scratch_bytes: tuple[int, ...] = ()
    staging_bytes: int = 0
    through: str = ""

    @property
    def is_packed(self) -> bool:
        """Returns True if tensors are copied into one buffer before sending, or out of one after receiving."""
        return bool(self.staging_bytes or self.scratch_bytes)


def exchange(node: Node, inputs: Sequence[TensorType], rank: int, size: int) -> Exchange:
    """Returns the exchange that a communication op performs on ``rank`` (of ``size`` ranks).

    Args:
        inputs: types of the op's operands on this rank.
    """
    found = _make_exchange(node, inputs, rank, size)
    return replace(found, through=node.marks.device_backend) if node.marks.device_backend else found


def _make_exchange(node: Node, inputs: Sequence[TensorType], rank: int, size: int) -> Exchange:
    ranks = tuple(int(r) for r in node.attrs.get("ranks", ())) or tuple(range(size))
    key = str(node.attrs.get("key", node.name))
    sent = count_operand_bytes(node, inputs)
    if node.op in POINT_TO_POINT:
        peer = int(node.attrs["peer"])
        pair = (rank, peer) if node.op == "WhaleSend" else (peer, rank)
        whole = sent if node.op == "WhaleSend" else node.outputs[0].bytes
        return Exchange("point_to_point", key, pair, whole, count_rank_bytes(node, inputs, 0, 2))
    mine = count_rank_bytes(node, inputs, ranks.index(rank), len(ranks))
    if node.op in ALL_REDUCES:
        is_staged = len(node.outputs) > 1 or bool(node.attrs.get("wire_dtype"))
        return Exchange("all_reduce", key, ranks, sent, mine, staging_bytes=sent if is_staged else 0)
    if node.op == "WhaleAllGather":
        whole, several = sum(t.bytes for t in node.outputs), len(node.outputs) > 1
        packed: tuple[int, ...] = (whole,) if several or _outer(inputs[1], int(node.attrs["axis"])) > 1 else ()
        return Exchange("all_gather", key, ranks, whole, mine, packed)
    if node.op == "WhaleReduceScatter":
        packed = (sent,) if _outer(inputs[1], int(node.attrs["axis"])) > 1 else ()
        return Exchange("reduce_scatter", key, ranks, sent, mine, packed)
    if node.op == "WhaleAllToAll":
        packed = (sent,) if _outer(inputs[1], int(node.attrs["split_axis"])) > 1 else ()
        if _outer(node.outputs[0], int(node.attrs["concat_axis"])) > 1:
            packed += (node.outputs[0].bytes,)
        return Exchange("all_to_all", key, ranks, sent, mine, packed)
    if node.op in ROW_EXCHANGES:
        return Exchange("all_to_all", key, ranks, mine * len(ranks), mine)
    assert node.op == "WhaleBroadcast", node.op
    return Exchange("broadcast", key, ranks, sum(t.bytes for t in node.outputs), mine)


def _outer(t: TensorType, axis: int) -> int:
    return math.prod(d or 1 for d in (t.shape or ())[:axis])
