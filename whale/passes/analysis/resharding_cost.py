"""Prices the alternatives that propagation chooses from; the unit is the time to move one byte at 1 GB/s, 1 ns.

The constants only have to order alternatives (move a tensor, or compute it twice). The calibrated model of time and
memory is the package cost_model, which also counts the FLOPs of a node.

Decision: 0032.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

from cost_model.kernels.op_work import count_matmul_flops
from whale.ir.layout import (
    B,
    Partial,
    PerRank,
    Placement,
    RankZero,
    Replicate,
    Shard,
    Strategy,
    count_moved_bytes,
    is_in_runs,
)
from whale.ir.values import Dims, TensorType

__all__ = ["change_cost", "compute_cost", "count_matmul_flops", "exchange_cost", "fraction", "move_cost"]

LATENCY = 10_000.0  # 10 us: one more collective
PER_BYTE_TOUCHED = 0.1  # memory at 10 GB/s
PER_FLOP = 0.02  # a core at 50 GFLOP/s


def fraction(placements: Sequence[Placement]) -> float:
    """Returns the largest share of a node's work that one coordinate does: 1.0 if no placement is a split, 0.5 for
    S(0)[4,4].

    Args:
      placements: of the node's operands and results.
    """
    best = 1.0
    for p in placements:
        if isinstance(p, Shard):
            total = p.run
            if total:
                best = min(best, p.largest / total)
    return best


def compute_cost(strategy: Strategy, touched_bytes: float, flops: int) -> float:
    """Returns the cost of computing one node under ``strategy``, on the coordinate with the most work.

    Args:
      touched_bytes: bytes of the unsharded operands and results.
      flops: FLOPs of the whole node, if it is a product or convolution; else 0.
    """
    return (touched_bytes * PER_BYTE_TOUCHED + flops * PER_FLOP) * fraction(strategy.inputs + strategy.outputs)


def exchange_cost(moved: int, parts: int, reads: bool, together: int = 1) -> float:
    """Returns the cost of the communication inside a node that exchanges rows of a table (all-to-all); 0 if nothing
    moves.

    Args:
      moved: bytes that all ranks send.
      reads: whether rows are read: numbers of ids, ids, and rows travel one after the other. Rows to add take one trip.
      together: number of nodes whose exchanges are fused, which share the latency.
    """
    return (3 if reads else 1) * LATENCY / together + moved / parts if moved else 0.0


@lru_cache(maxsize=1 << 16)
def change_cost(tensor: TensorType, source: Placement, wanted: Placement, parts: int, unknown_rows: int = 1) -> float:
    """Returns the cost of resharding a tensor from ``source`` to ``wanted``; infinite if that is impossible.

    Args:
      tensor: its global type.
      parts: size of the mesh axis.
      unknown_rows: upper limit for a number of rows that is known only at run time.
    """
    if source == wanted:
        return 0.0
    if isinstance(wanted, RankZero):
        return 0.0 if isinstance(source, Replicate) else inf
    if isinstance(wanted, PerRank) or (isinstance(source, Partial) and isinstance(wanted, Partial)):
        return inf
    if isinstance(wanted, Shard) and not _fits(wanted, tensor.shape):
        return inf
    if not tensor.is_static and (is_in_runs(source) or is_in_runs(wanted)):
        return inf
    if not tensor.is_static and isinstance(source, Shard) and not isinstance(wanted, Replicate):
        return inf  # a sharded tensor of dynamic shape can only be gathered whole
    if isinstance(source, Shard) and isinstance(wanted, Partial):
        wanted = B  # padding with zeros is free, but the sum has to be reduced later: price it as a gather
    return move_cost(source, wanted, max(1, tensor.bytes) * (1 if tensor.is_static else unknown_rows), parts)


def _fits(wanted: Shard, shape: Dims | None) -> bool:
    return shape is not None and wanted.dim < len(shape) and shape[wanted.dim] == wanted.extent


def move_cost(source: Placement, target: Placement, tensor_bytes: int, parts: int) -> float:
    """Returns the cost of a single reshard from ``source`` to ``target``: a latency, and the moved bytes per
    coordinate; 0 if nothing moves.

    Args:
      tensor_bytes: bytes of the whole tensor; 0 if unknown.
      parts: size of the mesh axis.
    """
    moved = count_moved_bytes(source, target, tensor_bytes, parts)
    if moved == 0 and not (tensor_bytes == 0 and isinstance(source, Partial)):
        return 0.0
    return LATENCY + moved / parts
