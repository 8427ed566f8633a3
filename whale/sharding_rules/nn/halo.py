"""Rules of convolutions over divided rows or columns: an operand also has its neighbours' adjacent rows
(``Split.halo``).

A rank computes the results whose windows begin in its own rows. Forward, and for the filter's gradient, it needs the
image's rows that these windows reach; for the image's gradient, the incoming gradients of all windows that reach its
own rows. Each operand is brought so by a reshard; the rank's node has explicit padding, which is that of the program
at the image's edges, and none where neighbours' rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.ir.layout import Split, split
from whale.ir.values import Dims
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial dimension: its number, its size in the image, reach of a window, step, padding before and after."""

    dim: int
    size: int
    reach: int
    step: int
    before: int
    after: int


def _find_shapes(op: OpView) -> tuple[Dims | None, Dims | None]:
    """Returns the shapes of the image and of the filter."""
    if "BackpropInput" in op.node.op:
        return op.outputs[0].shape, op.inputs[1].shape
    return op.inputs[0].shape, op.outputs[0].shape if "BackpropFilter" in op.node.op else op.inputs[1].shape


def _find_axes(op: OpView) -> list[_Axis]:
    """Returns the spatial dimensions, padded as SAME says; none where sizes are unknown."""
    image, kernel = _find_shapes(op)
    first = 2 if str(op.attr("data_format", "NHWC")).startswith("NC") else 1
    if image is None or kernel is None:
        return []
    found = []
    for i in range(2):
        size, width, step = image[first + i], kernel[i], int(op.attr("strides")[first + i])
        if size is None or width is None:
            return []
        gaps = op.attr("dilations", ()) or (1,) * len(image)
        reach = (width - 1) * int(gaps[first + i]) + 1
        padding = max((-(-size // step) - 1) * step + reach - size, 0)
        found.append(_Axis(first + i, size, reach, step, padding // 2, padding - padding // 2))
    return found


def _find_crossed_axis(op: OpView, strategy: Strategy) -> _Axis | None:
    """Returns the divided dimension over which windows reach further than they step, or None."""
    if op.attr("padding") != "SAME":
        return None
    cut = {p.dim for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Split)}
    image = strategy.outputs[0] if "BackpropInput" in op.node.op else strategy.inputs[0]
    if not isinstance(image, Split):
        return None
    return next((a for a in _find_axes(op) if a.dim == image.dim and a.dim in cut and a.reach > a.step), None)


def _widen(strategy: Strategy, i: int, halo: tuple[int, int]) -> Strategy | None:
    have = strategy.inputs[i]
    if not isinstance(have, Split) or have.blocks > 1:
        return None
    wide = split(have.dim, have.sizes, 1, halo)
    return replace(strategy, inputs=(*strategy.inputs[:i], wide, *strategy.inputs[i + 1 :]))


def widen_image(op: OpView, strategy: Strategy) -> Strategy | None:
    """Widens the image (operand 0) by the rows that windows of the rank's own results reach."""
    axis = _find_crossed_axis(op, strategy)
    return strategy if axis is None else _widen(strategy, 0, (axis.before, axis.reach - axis.step - axis.before))


def widen_gradient(op: OpView, strategy: Strategy) -> Strategy | None:
    """Widens the incoming gradient (operand 2) to that of all windows that reach the rank's own rows."""
    axis = _find_crossed_axis(op, strategy)
    if axis is None:
        return strategy
    before, after = (axis.reach - 1 - axis.before) // axis.step, (axis.step - 1 + axis.before) // axis.step
    return _widen(strategy, 2, (before, after))


def make_padding_explicit(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Makes the padding explicit: what lies outside of the image, counted from what the rank has of it."""
    axis = _find_crossed_axis(op, strategy)
    if axis is None:
        return UNCHANGED
    if "BackpropInput" in op.node.op:
        have, slope = strategy.outputs[0], strategy.inputs[2]
        assert isinstance(have, Split) and isinstance(slope, Split)
        first, end = slope.find_span(coordinate)
        begin, stop = have.find_span(coordinate)
        margins = begin - (first * axis.step - axis.before), (end - 1) * axis.step - axis.before + axis.reach - stop
    else:
        have = strategy.inputs[0]
        assert isinstance(have, Split)
        begin = have.starts[coordinate]
        stop = begin + have.sizes[coordinate]
        margins = max(0, have.halo[0] - begin), max(0, stop + have.halo[1] - axis.size)
    rank = len(str(op.attr("data_format", "NHWC")))
    padding = [0] * (2 * rank)
    for one in _find_axes(op):
        padding[2 * one.dim : 2 * one.dim + 2] = margins if one.dim == axis.dim else (one.before, one.after)
    return Local(attrs={"padding": "EXPLICIT", "explicit_paddings": tuple(padding)})
