"""Finds outputs that are known without running the op: those of empty shards, and shapes."""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Partial, PerRank, Placement, Shard, find_identity, local_shape
from whale.ir.ops import FOLDS, MATMULS, VIEWS
from whale.ir.values import UNMOVABLE, TensorType, find_numpy_dtype
from whale.sharding_rules.base import OpView, Strategy, local_output_shape
from whale.sharding_rules.registry import find_rule

_TAKES_NOTHING = MATMULS | VIEWS | FOLDS | {"BiasAdd", "Einsum"}


def find_known_outputs(
    op: OpView, strategy: Strategy, coordinate: int, microbatched: bool = False
) -> tuple[np.ndarray | None, ...]:
    """Returns, for each output, the constant that it is on ``coordinate``; None where the kernel has to run.

    Kernels differ on zero rows (ArgMax fails, Mean yields NaN). So a coordinate whose shard of a cut dimension is empty
    gets constants instead: empty tensors for sharded outputs, the identity element of the reduction for partial ones.

    Args:
      microbatched: True if micro-batches are planned afterwards. A rank with rows and an empty shard of columns then
        has to compute its (empty) sums for each micro-batch, which constants would not show; so kernels that accept
        empty tensors run.
    """
    rule = find_rule(op.node.op)
    if rule is not None and rule.is_exchanging_rows(op, strategy):
        return (None,) * len(op.outputs)  # a rank without rows or ids takes part in the exchange all the same
    if rule is not None and rule.known is not None:
        return rule.known(op, strategy, coordinate)
    if not any(isinstance(p, Shard) and p.sizes[coordinate] == 0 for p in strategy.inputs + strategy.outputs):
        return (None,) * len(op.outputs)
    if microbatched and _accepts_empty(op) and _has_rows(op, strategy, coordinate):
        return (None,) * len(op.outputs)
    return tuple(
        _make_empty_output(t, p, local_output_shape(op, strategy, i, coordinate))
        for i, (t, p) in enumerate(zip(op.outputs, strategy.outputs))
    )


def _accepts_empty(op: OpView) -> bool:
    """Returns True if the op's kernel also computes tensors without elements correctly: elementwise ops, and sums."""
    rule = find_rule(op.node.op)
    spec = rule.spec if rule is not None else None
    return op.node.op in _TAKES_NOTHING or (isinstance(spec, str) and set(spec) <= set("*., ->"))


def _has_rows(op: OpView, strategy: Strategy, coordinate: int) -> bool:
    """Returns True if, on ``coordinate``, dimension 0 of the first operand and of all outputs is not empty."""
    sides = ((op.inputs[:1], strategy.inputs), (op.outputs, strategy.outputs))
    shapes = [local_shape(t.shape, p, coordinate) for types, lie in sides for t, p in zip(types, lie)]
    return all(shape and shape[0] for shape in shapes)


def _make_empty_output(
    kind: TensorType, placement: Placement, shape: tuple[int | None, ...] | None
) -> np.ndarray | None:
    if isinstance(placement, PerRank):  # weighs nothing, but must not be NaN
        return np.zeros(() if shape is None else [s or 0 for s in shape], find_numpy_dtype(kind.dtype))
    if kind.dtype in UNMOVABLE or shape is None:
        return None
    sizes = [s for s in shape if s is not None]
    if len(sizes) < len(shape):
        return None
    if isinstance(placement, Shard):
        return np.zeros(sizes, find_numpy_dtype(kind.dtype))
    if isinstance(placement, Partial):
        return np.full(sizes, find_identity(placement.op, kind.dtype), find_numpy_dtype(kind.dtype))
    return None
