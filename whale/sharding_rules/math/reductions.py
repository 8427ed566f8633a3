"""Defines sharding rules of reductions: each rank reduces its shard of a reduced dimension, and the result is
partial.
"""

from __future__ import annotations

from whale.ir.layout import Partial, Shard
from whale.ir.values import FLOATING
from whale.sharding_rules.base import (
    UNCHANGED,
    Local,
    OpView,
    Strategy,
    freeze,
    make_labels,
    read_axis,
    read_constant,
    write_term,
)
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def _find_reduced_dims(op: OpView) -> set[int] | None:
    """Returns the dimensions that are reduced; None if that is unknown."""
    shape, axes = op.inputs[0].shape, read_constant(op, 1)
    if shape is None:
        return None
    if axes is not None:
        return {a % len(shape) for a in axes} if shape else set()
    if op.attr("keep_dims", False):
        # The sizes tell: a dimension whose size became 1 was reduced. For a size of 1 before, it makes no difference.
        after = op.outputs[0].shape
        if after is None or None in shape or None in after:
            return None
        return {i for i, (a, b) in enumerate(zip(shape, after)) if a != b}
    after = op.outputs[0].shape
    return set(range(len(shape))) if after == () else None


def _write_line(op: OpView, flag: str) -> str:
    reduced = _find_reduced_dims(op)
    if reduced is None:
        return REPLICATED
    labels = make_labels("a", len(op.inputs[0].shape or ()))
    operand = [x + flag if i in reduced else x for i, x in enumerate(labels)]
    keep = op.attr("keep_dims", False)
    result = ["1" if i in reduced else x for i, x in enumerate(labels) if keep or i not in reduced]
    return f"{write_term(operand)}, . -> {write_term(result)}"


def reduction(op: OpView) -> str:
    """Writes the sharding rule of a reduction, from the axes (constant, or told by the shapes) and ``keep_dims``."""
    return _write_line(op, "+")


def mean(op: OpView) -> str:
    """Writes the sharding rule of Mean: reduced axes of static size can be sharded if the type is floating."""
    reduced, shape = _find_reduced_dims(op), op.inputs[0].shape
    known = reduced is not None and shape is not None and all(shape[i] is not None for i in reduced)
    return _write_line(op, "+" if known and op.outputs[0].dtype in FLOATING else "^")


def _mean_is_linear(op: OpView) -> str | None:
    """Returns ``lin`` of Mean: partial sums pass a floating mean; None for an integer mean, which rounds."""
    return "0" if op.outputs[0].dtype in FLOATING else None


def frozen_reduction(op: OpView) -> str:
    """Writes the sharding rule of a reduction whose reduced axes cannot be sharded."""
    return _write_line(op, "^")


def _compute_mean_as_sum(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Turns a Mean over a sharded dimension into a Sum divided by the global count, since an empty shard has no
    mean.
    """
    if not (isinstance(strategy.outputs[0], Partial) and isinstance(strategy.inputs[0], Shard)):
        return UNCHANGED
    count = 1
    for i in _find_reduced_dims(op) or ():
        count *= op.inputs[0].shape[i]  # type: ignore[index,operator]
    return Local(op="Sum", divide_by=float(count))


def _pass_without_axes(op: OpView) -> str | None:
    """Returns ``lin`` of Max, Min, Prod, Any and All: partial sums pass only if no axis is reduced, since the result is
    then the operand.
    """
    return "0" if _find_reduced_dims(op) == set() else None


def arg_reduction(op: OpView) -> str:
    """Writes the sharding rule of ArgMax and ArgMin: all axes but the reduced one can be sharded."""
    shape, axes = op.inputs[0].shape, read_constant(op, 1)
    if shape is None or axes is None:
        return REPLICATED
    labels = make_labels("a", len(shape))
    at = axes[0] % len(shape)
    return f"{write_term(freeze(labels, [at]))}, . -> {write_term(x for i, x in enumerate(labels) if i != at)}"


def cumulative(op: OpView) -> str:
    """Writes the sharding rule of a cumulative op: all axes but its own can be sharded."""
    before = op.inputs[0].shape
    at = None if before is None else read_axis(op, 1, len(before))
    if before is None or at is None:
        return REPLICATED
    labels = write_term(freeze(make_labels("a", len(before)), [at]))
    return f"{labels}, . -> {labels}"


def approximate_top_k(op: OpView) -> str:
    """Writes the sharding rule of ApproxTopK: all axes but ``reduction_dimension`` can be sharded."""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    labels, at = make_labels("a", len(before)), int(op.attr("reduction_dimension", -1)) % len(before)
    result = write_term("k^" if n == at else x for n, x in enumerate(labels))
    return f"{write_term(freeze(labels, [at]))} -> {result}, {result}"


RULES = (
    rule("Sum", reduction, lin="0"),
    rule("Mean", mean, lin=_mean_is_linear, local=_compute_mean_as_sum),
    rule("Max Any", reduction, lin=_pass_without_axes, mono="max:0", reduce="max"),
    rule("Min All", reduction, lin=_pass_without_axes, mono="min:0", reduce="min"),
    rule("Prod", reduction, lin=_pass_without_axes, reduce="prod"),
    rule("EuclideanNorm", frozen_reduction),
    rule("ArgMax ArgMin", arg_reduction),
    rule("L2Loss", "p*+ -> ."),
    rule("Cumsum", cumulative, lin="0"),
    rule("Cumprod CumulativeLogsumexp", cumulative),
    rule("TopKV2", "* n^, . -> * k^, * k^"),
    rule("TopK TopKUnique TopKWithUnique", "* n^ -> * k^, * k^"),
    rule("ApproxTopK", approximate_top_k),
    rule("NthElement", "* n^, . -> *"),
    rule("IsotonicRegression", "b n^ -> b n^, b n^"),
)
