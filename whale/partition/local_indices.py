"""Emits the nodes that turn indices into a split dimension into a rank's own (``whale.sharding_rules.base.Window``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whale.ir.emitter import Emitter
from whale.ir.marks import Marks
from whale.ir.program import Ref
from whale.ir.values import DType, TensorType, find_numpy_dtype, require_static_shape
from whale.sharding_rules.base import Window


def emit_window(e: Emitter, name: str, window: Window, inputs: list[Ref], types: Sequence[TensorType]) -> Ref:
    """Replaces the indices in ``inputs`` by the rank's own, and zeroes the operand that is masked.

    Args:
      types: of the operands on this rank.

    Returns:
      For each index whether it falls into the rank's part.
    """
    source, t = inputs[window.indices], types[window.indices]
    if window.column is not None:
        return _emit_column_window(e, name, window, inputs, types)
    kind = {"T": DType(t.dtype)}

    def emit_number(suffix: str, value: int) -> Ref:
        return e.const(f"{name}/{suffix}", np.array(value, find_numpy_dtype(t.dtype)))

    moved = e.add(f"{name}/from_first", "Sub", (source, emit_number("offset", window.offset)), kind, (t,))
    near = e.add(f"{name}/not_above", "Minimum", (moved, emit_number("last", window.size - 1)), kind, (t,))
    near = e.add(f"{name}/not_below", "Maximum", (near, emit_number("first", 0)), kind, (t,))
    flags = (TensorType("bool", t.shape),)
    inside = e.add(f"{name}/inside", "Equal", (moved, near), {**kind, "incompatible_shape_error": True}, flags)
    if window.masked is None:
        near = e.add(f"{name}/or_none", "SelectV2", (inside, moved, emit_number("none", -1)), kind, (t,))
    inputs[window.indices] = near
    if window.masked is not None and window.masked >= 0:
        at = window.masked
        inputs[at] = emit_zeroed(e, f"{name}/values", window, inputs[at], types[at], inside, t)
    return inside


def _emit_column_window(e: Emitter, name: str, window: Window, inputs: list[Ref], types: Sequence[TensorType]) -> Ref:
    """Does the same for indices of several columns.

    Operands with rows of their own lose those that fall elsewhere. Where there are elements alone, whose flags have
    their shape, those that fall elsewhere keep the old value.
    """
    source, t = inputs[window.indices], types[window.indices]
    shape = require_static_shape(t)
    *lead, columns = shape
    one = TensorType(t.dtype, tuple(lead))
    begin, end, at = [0] * len(lead) + [window.column], [*lead, (window.column or 0) + 1], np.int32
    bounds = [e.const(f"{name}/{n}", np.array(v, at)) for n, v in (("begin", begin), ("end", end))]
    strides = e.const(f"{name}/strides", np.ones(len(shape), at))
    masks = {"begin_mask": 0, "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0}
    attrs = {"T": DType(t.dtype), "Index": DType("int32"), **masks, "shrink_axis_mask": 1 << len(lead)}
    column = e.add(f"{name}/column", "StridedSlice", (source, *bounds, strides), attrs, (one,))
    seen, kinds = [column], [one]
    inner = replace(window, indices=0, column=None, rows=None, masked=-1)
    inside = emit_window(e, f"{name}/of_column", inner, seen, kinds)
    # The other columns stay: what this one changed by is added to it alone.
    kind = {"T": DType(t.dtype)}
    change = e.add(f"{name}/change", "Sub", (seen[0], column), kind, (one,))
    change = e.reshape(f"{name}/changes", change, t.dtype, (*lead, 1))
    only = e.const(f"{name}/only", np.eye(columns, dtype=find_numpy_dtype(t.dtype))[window.column])
    spread = e.add(f"{name}/by_column", "Mul", (change, only), kind, (t,))
    local = e.add(f"{name}/local", "AddV2", (source, spread), kind, (t,))
    inputs[window.indices] = local
    if (masked := window.masked) is not None and masked >= 0:
        values = types[masked]
        if window.old is None:
            inputs[masked] = emit_zeroed(e, f"{name}/values", window, inputs[masked], values, inside, one)
        else:
            attrs = {"Tparams": DType(values.dtype), "Tindices": DType(t.dtype)}
            old, marks = (inputs[window.old], local), Marks(blocks=window.blocks)
            there = e.add(f"{name}/there", "GatherNd", old, attrs, (values,), marks=marks)
            operands = (inside, inputs[masked], there)
            inputs[masked] = e.add(f"{name}/values", "SelectV2", operands, {"T": DType(values.dtype)}, (values,))
    if window.rows is None:
        return inside
    count = math.prod(lead)
    flags = e.reshape(f"{name}/flags", inside, "bool", (count,))
    own = e.add(f"{name}/own", "Where", (flags,), {"T": DType("bool")}, (TensorType("int64", (None, 1)),))
    for operand in (window.indices, window.rows):
        t = types[operand]
        rest = require_static_shape(t)[len(lead) :]
        flat = e.reshape(f"{name}/flat_{operand}", inputs[operand], t.dtype, (count, *rest))
        found = (TensorType(t.dtype, (None, *rest)),)
        attrs = {"Tparams": DType(t.dtype), "Tindices": DType("int64")}
        inputs[operand] = e.add(f"{name}/own_{operand}", "GatherNd", (flat, own), attrs, found)
    return inside


def emit_zeroed(
    e: Emitter, name: str, window: Window, values: Ref, t: TensorType, inside: Ref, indices: TensorType
) -> Ref:
    """Emits ``values``, of type ``t``, with zeros where the index falls elsewhere."""
    flags = require_static_shape(indices)
    shape = (1,) * window.at + flags + (1,) * (len(require_static_shape(t)) - window.at - len(flags))
    flag = inside if shape == flags else e.reshape(f"{name}/whale_inside", inside, "bool", shape)
    zero = e.const(f"{name}/whale_zero", np.zeros((), find_numpy_dtype(t.dtype)))
    return e.add(name, "SelectV2", (flag, values, zero), {"T": DType(t.dtype)}, (t,))
