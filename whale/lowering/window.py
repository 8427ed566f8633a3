"""Indices into a dimension of which a rank holds a part (whale.rules.base.Window), as nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.ir.program import Ref
from whale.ir.values import DType, TensorType, numpy_dtype, static_shape
from whale.lowering.emit import Emitter
from whale.rules.base import Window


def emit_window(e: Emitter, name: str, window: Window, inputs: list[Ref], types: Sequence[TensorType]) -> Ref:
    """Replaces, in ``inputs``, the indices by the rank's own, and zeroes the operand that is masked.

    Args:
      types: of the operands on this rank.

    Returns:
      For each index whether it falls into the rank's part.
    """
    source, t = inputs[window.indices], types[window.indices]
    kind = {"T": DType(t.dtype)}

    def number(suffix: str, value: int) -> Ref:
        return e.const(f"{name}/{suffix}", np.array(value, numpy_dtype(t.dtype)))

    moved = e.add(f"{name}/from_first", "Sub", (source, number("offset", window.offset)), kind, (t,))
    near = e.add(f"{name}/not_above", "Minimum", (moved, number("last", window.size - 1)), kind, (t,))
    near = e.add(f"{name}/not_below", "Maximum", (near, number("first", 0)), kind, (t,))
    flags = (TensorType("bool", t.shape),)
    inside = e.add(f"{name}/inside", "Equal", (moved, near), {**kind, "incompatible_shape_error": True}, flags)
    if window.masked is None:
        near = e.add(f"{name}/or_none", "SelectV2", (inside, moved, number("none", -1)), kind, (t,))
    inputs[window.indices] = near
    if window.masked is not None and window.masked >= 0:
        at = window.masked
        inputs[at] = emit_zeroed(e, f"{name}/values", window, inputs[at], types[at], inside, t)
    return inside


def emit_zeroed(
    e: Emitter, name: str, window: Window, values: Ref, t: TensorType, inside: Ref, indices: TensorType
) -> Ref:
    """``values``, of type ``t``, with zeros where the index falls elsewhere."""
    flags = static_shape(indices)
    shape = (1,) * window.at + flags + (1,) * (len(static_shape(t)) - window.at - len(flags))
    flag = inside if shape == flags else e.reshape(f"{name}/whale_inside", inside, "bool", shape)
    zero = e.const(f"{name}/whale_zero", np.zeros((), numpy_dtype(t.dtype)))
    return e.add(name, "SelectV2", (flag, values, zero), {"T": DType(t.dtype)}, (t,))
