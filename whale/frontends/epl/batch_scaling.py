"""Infers how a tensor of a graph changes with the number of rows in the batch.

With twice as many rows, the mean of a loss stays equal, and its sum doubles. Whale computes one value for the rows of
all replicas. EPL scripts ask for the mean or sum of the replicas' own values. If the growth with rows is known, these
follow from Whale's value: with n replicas, a sum over rows is n times the mean of the replicas' sums.

Decision: 0069.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

_READS = {"IteratorGetNext", "IteratorGetNextSync", "Placeholder", "PlaceholderWithDefault", "QueueDequeueV2"} | {
    "QueueDequeueManyV2", "QueueDequeueUpToV2", "PyFunc", "EagerPyFunc", "PyFuncStateless"}  # fmt: skip
_SAME = {"Identity", "Cast", "Neg", "Abs", "StopGradient", "CheckNumerics", "Squeeze", "EnsureShape", "PreventGradient"}
_PRODUCTS, _QUOTIENTS = {"Mul", "MulNoNan"}, {"RealDiv", "Div", "DivNoNan", "FloorDiv", "TruncateDiv"}
_ALIKE = {"Add", "AddV2", "Sub", "AddN", "Maximum", "Minimum"}
_ASSIGNS = {"AssignAddVariableOp", "AssignSubVariableOp"}


@dataclass(frozen=True)
class BatchScaling:
    """Describes how a tensor changes with the number of rows in the batch.

    Attributes:
      rows: True if dimension 0 of the tensor is that of the batch.
      power: with n times as many rows, each element is n ** power times as large: 0 for a mean over rows, 1 for a sum.
      shape: True if the tensor is a shape vector whose first element is the number of rows.
    """

    rows: bool = False
    power: float = 0
    shape: bool = False


def find_scaling(tensor: tf.Tensor) -> BatchScaling | None:
    """Returns how ``tensor`` changes with the number of rows in the batch; None if this cannot be inferred.

    Walks the graph from iterators and placeholders, whose outputs have rows, to ``tensor``.
    """
    found: dict[str, BatchScaling | None] = {}
    stack = [tensor]
    while stack:
        one = stack[-1]
        if one.name in found:
            stack.pop()
            continue
        before = [t for t in _list_operands(one) if t.name not in found]
        if before and len(stack) < 100_000:
            found.setdefault(f"{one.name} waits", None)
            stack += before
            for t in before:  # a loop through a variable is cut here
                if f"{t.name} waits" in found:
                    found[t.name] = None
            continue
        found[one.name] = _find_op_scaling(one, [found[t.name] for t in _list_operands(one)])
        stack.pop()
    return found[tensor.name]


def _list_operands(tensor: tf.Tensor) -> list[tf.Tensor]:
    op = tensor.op
    if op.type in _READS or op.type in ("Const", "VarHandleOp"):
        return []
    if op.type == "ReadVariableOp":
        return [use.inputs[1] for use in op.inputs[0].consumers() if use.type in _ASSIGNS]
    return list(op.inputs)


def _find_op_scaling(tensor: tf.Tensor, operands: Sequence[BatchScaling | None]) -> BatchScaling | None:
    op = tensor.op
    if op.type in _READS:
        return BatchScaling(rows=bool(tensor.shape.rank is None or tensor.shape.rank > 0))
    if op.type in ("Const", "VarHandleOp"):
        return BatchScaling()
    if op.type == "ReadVariableOp":
        return operands[0] if operands else BatchScaling()
    if any(o is None for o in operands):
        return None
    known = [o for o in operands if o is not None]
    first = known[0] if known else BatchScaling()
    rows = any(o.rows for o in known)
    if op.type in _SAME:
        return first
    if op.type in ("Shape", "ShapeN"):
        return BatchScaling(shape=first.rows)
    if op.type == "Size":
        return BatchScaling(power=float(first.rows))
    if op.type == "StridedSlice" and first.shape:
        begin = tf.get_static_value(op.inputs[1])
        return None if begin is None else BatchScaling(power=float(int(begin[0]) == 0))
    if any(o.shape for o in known):
        return _find_shape_scaling(op, tensor, known)
    if op.type in ("Sum", "Mean", "Max", "Min"):
        return _find_reduced_scaling(op, first)
    if op.type in _PRODUCTS:
        return BatchScaling(rows, sum(o.power for o in known))
    if op.type in _QUOTIENTS:
        return BatchScaling(rows, first.power - sum(o.power for o in known[1:]))
    if op.type in ("Maximum", "Minimum") and any(t.op.type == "Const" for t in op.inputs):
        return max(known, key=lambda o: (o.power, o.rows))  # a bound, as that of a divisor
    if op.type in _ALIKE:
        return BatchScaling(rows, first.power) if len({o.power for o in known}) == 1 else None
    if op.type in ("Select", "SelectV2"):
        return BatchScaling(rows, known[1].power) if known[1].power == known[2].power else None
    if op.type == "Square":
        return BatchScaling(rows, 2 * first.power)
    if op.type == "Sqrt":
        return BatchScaling(rows, first.power / 2)
    if op.type == "MatMul" and rows:
        contracted = (known[0].rows and op.get_attr("transpose_a"), known[1].rows and not op.get_attr("transpose_b"))
        if any(contracted):
            return BatchScaling(power=known[0].power + known[1].power + 1) if all(contracted) else None
    if any(o.power for o in known):
        # The values of a comparison do not grow; of other ops nothing is known for sure.
        return (
            BatchScaling(rows)
            if op.type in ("Greater", "Equal", "Less", "NotEqual", "GreaterEqual", "LessEqual")
            else None
        )
    if not rows:
        return BatchScaling()
    # A value with an open dimension 0 behind operands that have rows is taken for rows.
    return BatchScaling(rows=True) if _is_open(tensor) else None


def _find_shape_scaling(op: tf.Operation, tensor: tf.Tensor, known: Sequence[BatchScaling]) -> BatchScaling | None:
    if op.type == "Prod":
        return BatchScaling(power=1)
    if op.type in ("Reshape", "BroadcastTo", "Fill"):
        return BatchScaling(rows=True, power=known[-1].power if op.type == "Fill" else known[0].power)
    if op.type in ("Cast", "Identity"):
        return BatchScaling(shape=True)
    return None if any(o.power for o in known) else BatchScaling(rows=_is_open(tensor))


def _find_reduced_scaling(op: tf.Operation, operand: BatchScaling) -> BatchScaling | None:
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if not operand.rows:
        return operand
    if axes is None:
        return None
    numbers = [int(a) for a in axes.ravel()]
    if rank is None and any(a < 0 for a in numbers):
        return None
    if 0 not in [a % rank if rank else a for a in numbers]:
        return operand
    return BatchScaling(power=operand.power + (op.type == "Sum"))


def _is_open(tensor: tf.Tensor) -> bool:
    """Returns True if the size of dimension 0 is unknown."""
    return bool(tensor.shape.rank) and tensor.shape.as_list()[0] is None
