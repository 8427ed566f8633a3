"""Prices the alternatives that propagation chooses from; the unit is the time to move one byte over a link of 1 GB/s.

These constants only have to order alternatives (move a tensor or compute it twice); the calibrated model of time and
memory is cost_model's, and so are the FLOPs of a node.

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
    """Returns the largest share of a node's work that one coordinate does, given the placements of operands and
    results.
    """
    best = 1.0
    for p in placements:
        if isinstance(p, Shard):
            total = p.run
            if total:
                best = min(best, p.largest / total)
    return best


def compute_cost(strategy: Strategy, touched_bytes: float, flops: int) -> float:
    """Returns the cost of computing one node under ``strategy`` on the coordinate with the most work.

    Args:
      touched_bytes: of the whole operands and results; flops: of the whole node, if it is a product or convolution.
    """
    return (touched_bytes * PER_BYTE_TOUCHED + flops * PER_FLOP) * fraction(strategy.inputs + strategy.outputs)


def exchange_cost(moved: int, parts: int, reads: bool, together: int = 1) -> float:
    """Returns the cost of a node that exchanges rows between ranks itself (an all-to-all), ``moved`` bytes in all.

    Args:
      reads: whether rows are read: numbers of ids, ids and rows then travel one after the other; rows to add take
          one trip.
      together: the number of nodes whose exchanges are fused.
    """
    return (3 if reads else 1) * LATENCY / together + moved / parts if moved else 0.0


@lru_cache(maxsize=1 << 16)
def change_cost(tensor: TensorType, source: Placement, wanted: Placement, parts: int, unknown_rows: int = 1) -> float:
    """Returns the cost of resharding a tensor from ``source`` to ``wanted``; infinite where that is impossible.

    Args:
      tensor: its global type; parts: size of the mesh axis.
      unknown_rows: upper bound on the number of rows where only the run knows it.
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
        return inf  # where only the run knows sizes, a split can be gathered whole, nothing finer
    if isinstance(source, Shard) and isinstance(wanted, Partial):
        wanted = B  # the fill is free, but what was divided would have to be reduced whole some day
    return move_cost(source, wanted, max(1, tensor.bytes) * (1 if tensor.is_static else unknown_rows), parts)


def _fits(wanted: Shard, shape: Dims | None) -> bool:
    return shape is not None and wanted.dim < len(shape) and shape[wanted.dim] == wanted.extent


def move_cost(source: Placement, target: Placement, tensor_bytes: int, parts: int) -> float:
    """Returns the cost of one reshard of ``tensor_bytes``: bytes per coordinate, and a latency when anything moves."""
    moved = count_moved_bytes(source, target, tensor_bytes, parts)
    if moved == 0 and not (tensor_bytes == 0 and isinstance(source, Partial)):
        return 0.0
    return LATENCY + moved / parts
