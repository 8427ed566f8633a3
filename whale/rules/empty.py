"""Outputs that a rank knows without running the op: those of a share with no rows, and shapes."""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Partial, PerRank, Placement, Split, identity_value
from whale.ir.values import UNMOVABLE, TensorType, numpy_dtype
from whale.rules.base import OpView, Strategy, local_output_shape
from whale.rules.registry import rule_of


def known_outputs(op: OpView, strategy: Strategy, coordinate: int) -> tuple[np.ndarray | None, ...]:
    """Per output the constant that it is on ``coordinate``; None where the kernel must run.

    Kernels differ on zero rows (ArgMax fails, Mean gives NaN), so a coordinate whose share of the cut dimension is 0
    gets constants instead: empty tensors for cut outputs, the identity of the reduction for partial ones.
    """
    rule = rule_of(op.node.op)
    if rule is not None and rule.known is not None:
        return rule.known(op, strategy, coordinate)
    if not any(isinstance(p, Split) and p.sizes[coordinate] == 0 for p in strategy.inputs + strategy.outputs):
        return (None,) * len(op.outputs)
    return tuple(
        _of_nothing(t, p, local_output_shape(op, strategy, i, coordinate))
        for i, (t, p) in enumerate(zip(op.outputs, strategy.outputs))
    )


def _of_nothing(kind: TensorType, placement: Placement, shape: tuple[int | None, ...] | None) -> np.ndarray | None:
    if isinstance(placement, PerRank):  # weighs nothing, but must not be NaN
        return np.zeros(() if shape is None else [s or 0 for s in shape], numpy_dtype(kind.dtype))
    if kind.dtype in UNMOVABLE or shape is None:
        return None
    sizes = [s for s in shape if s is not None]
    if len(sizes) < len(shape):
        return None
    if isinstance(placement, Split):
        return np.zeros(sizes, numpy_dtype(kind.dtype))
    if isinstance(placement, Partial):
        return np.full(sizes, identity_value(placement.op, kind.dtype), numpy_dtype(kind.dtype))
    return None
