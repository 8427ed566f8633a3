"""Chooses the all-reduces that are rounded to 16 bits before they are sent (`communication.wire_dtype`).

These are gradients: float32 sums in the main graph, of rank 1 or more, that end in an update of a variable. Either no
other communication depends on them, or they are reduce-scattered for an update of sharded state. Other sums keep their
dtype: the loss and metrics, which a user reads; batch statistics, which later computation uses; and all sums that
Horovod runs.

Decision: 0042.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.layout import P_SUM, Replicate, Shard, count_moved_bytes, count_wire_bytes
from whale.ir.ops import REF_UPDATES, UPDATES
from whale.ir.plan import Reshard
from whale.ir.program import Program
from whale.ir.values import TensorType
from whale.passes.analysis.uses import is_taken_by_updates
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.resharding.horovod import find_waited_for

_UPDATES = UPDATES | REF_UPDATES


def can_narrow(program: Program, r: Reshard) -> bool:
    """Returns True if Whale can send this reshard in fewer bits: a float32 sum of the main graph that Whale itself
    runs.
    """
    return (
        r.graph == ""
        and r.backend == "whale"
        and r.source == P_SUM
        and isinstance(r.target, Replicate | Shard)
        and program.find_type(r.ref).dtype == "float32"
    )


def narrow(
    program: Program, layout: GraphLayout, reshards: tuple[Reshard, ...], dtype: str, size: int
) -> tuple[Reshard, ...]:
    """Returns ``reshards`` with the sums of gradients set to be sent as ``dtype``, and their bytes adjusted.

    Args:
      layout: of the program itself, without its functions.
      dtype: the 16-bit dtype on the wire.
      size: number of ranks.
    """
    moves_after = find_waited_for(program, layout, reshards)
    updating: set[str] = set()
    for node in reversed(program.nodes):
        if node.op in _UPDATES or node.name in updating:
            updating.update(ref.node for ref in node.inputs)

    def narrow_one(r: Reshard) -> Reshard:
        if not can_narrow(program, r) or r.ref.node not in updating:
            return r
        scattered = isinstance(r.target, Shard)  # weights are gathered after an update of their parts
        if (scattered and not is_taken_by_updates(program, r.ref)) or (not scattered and r.key in moves_after):
            return r
        tensor = program.find_type(r.ref)
        if tensor.shape == ():
            return r
        r = replace(r, wire_dtype=dtype)
        return replace(r, bytes=reshard_bytes(r, tensor, size))

    return tuple(map(narrow_one, reshards))


def reshard_bytes(r: Reshard, tensor: TensorType, size: int) -> int:
    """Returns the logical bytes that a reshard of ``tensor`` moves between ``size`` ranks, in its wire dtype."""
    return count_moved_bytes(r.source, r.target, count_wire_bytes(tensor.bytes, tensor.dtype, r.wire_dtype), size)
