"""Rules of ops that are linear in some operands, so that partial sums pass through them."""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import FLOATING, Shape
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.registry import rule


def _cast_is_linear(op: OpView) -> str | None:
    """Lets P(sum) pass a Cast between floating types: integers truncate; rounding for sending comes after the sum."""
    if op.marks.rounds_for_wire:
        return None
    return "0" if op.inputs[0].dtype in FLOATING and op.outputs[0].dtype in FLOATING else None


def _cast_is_monotone(op: OpView) -> str | None:
    """Lets P(max) pass a Cast that keeps order: to floating types, and from bool."""
    return "0" if op.outputs[0].dtype in FLOATING or op.inputs[0].dtype == "bool" else None


def _div_is_linear(op: OpView) -> str | None:
    """Lets P(sum) pass a division's numerator where the division does not round."""
    return "0" if op.outputs[0].dtype in FLOATING else None


def _add_line(op: OpView) -> str | None:
    """Lets P(sum) pass an addition of which all operands are partial; strings concatenate instead."""
    return None if op.outputs[0].dtype == "string" else "0&1"


def _find_no_known_outputs(op: OpView, strategy: Strategy, coordinate: int) -> tuple[np.ndarray | None, ...]:
    """Returns no known outputs: each output has its own layout, and an empty one says nothing about the others."""
    return (None,) * len(op.outputs)


def _set_asserted_shape(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the asserted shape, a global attribute, to the local one."""
    placement, shape = strategy.outputs[0], op.attr("shape")
    if not isinstance(placement, Shard) or not isinstance(shape, Shape) or shape.dims is None:
        return UNCHANGED
    dims = list(shape.dims)
    if dims[placement.dim] is not None:
        dims[placement.dim] = placement.local_size(coordinate)
    return Local(attrs={"shape": Shape(tuple(dims))})


RULES = (
    rule(
        "Identity StopGradient PreventGradient Snapshot RefIdentity DeepCopy Copy CopyHost DebugGradientIdentity "
        "WhaleHold DebugIdentity DebugIdentityV2 GuaranteeConst",
        "* -> *",
        copy="0",
    ),
    rule("EnsureShape PlaceholderWithDefault", "* -> *", copy="0", local=_set_asserted_shape),
    rule("IdentityN", "{?} -> {?}", known=_find_no_known_outputs),
    rule("CheckNumerics CheckNumericsV2", "* -> *", lin="0", mono="0"),
    rule("Neg Conj Real Imag", "* -> *", lin="0"),
    rule("AddV2 Add", "*, * -> *", lin=_add_line, mono="0|1"),
    rule("Sub", "*, * -> *", lin="0&1", mono="0"),
    rule("AddN AccumulateNV2", "{*} -> *", lin="all"),
    rule("Mul MulNoNan", "*, * -> *", lin="0|1"),
    rule("RealDiv Div DivNoNan", "*, * -> *", lin=_div_is_linear),
    rule("Complex", "*, * -> *", lin="0&1"),
    rule("Cast", "* -> *", lin=_cast_is_linear, mono=_cast_is_monotone),
)
