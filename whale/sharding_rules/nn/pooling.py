"""Pooling and its gradients: cut by batch and channels, and by rows and columns where windows do not overlap."""

from __future__ import annotations

from collections.abc import Callable

from whale.ir.values import Dims
from whale.sharding_rules.base import OpView
from whale.sharding_rules.dims import constant, names, term, windows
from whale.sharding_rules.registry import rule


def _places(op: OpView, image: Dims | None, operand: int | None) -> tuple[list[str], list[str]]:
    """Writes an image's dimensions before and after the pooling; they are cut together where windows do not overlap.

    Args:
      operand: number of the operand that holds the window's size, before that of the steps; None: attributes do.
    """
    window = list(op.attr("ksize", ())) if operand is None else constant(op, operand)
    steps = list(op.attr("strides", ())) if operand is None else constant(op, operand + 1)
    if not window or not steps:
        rest = len(str(op.attr("data_format", "NHWC"))) - 1
        return ["b", *(f"{x}^" for x in names("x", rest))], ["b", *(f"{y}^" for y in names("y", rest))]
    before, after = [f"{x}^" for x in names("x", len(window))], [f"{y}^" for y in names("y", len(window))]
    if op.attr("padding") in ("SAME", "VALID"):
        for n, found in enumerate(windows(image, window, steps)):
            if found is not None:
                before[n], after[n] = found, f"s{n}"
    return before, after


def pool(before: str, after: str, window: int | None = None) -> Callable[[OpView], str]:
    """Returns the spec whose terms are images before (x) or after (y) the pooling; ``window``: operand that holds its
    size.
    """
    operands = [w.strip() for w in before.split(",")]

    def pooling(op: OpView) -> str:
        """the window and its steps"""
        image = op.inputs[operands.index("x")] if "x" in operands else op.outputs[0]
        words = dict(zip("xy", map(term, _places(op, image.shape, window))))
        return f"{', '.join(words.get(w, w) for w in operands)} -> {words[after]}"

    return pooling


def argmax_pool(before: str, after: str) -> Callable[[OpView], str]:
    """Returns the spec of pooling with flat indices, which count channels, and the batch if
    ``include_batch_in_index``.
    """

    def pooling_with_argmax(op: OpView) -> str:
        """include_batch_in_index"""
        batch = "b^" if op.attr("include_batch_in_index", False) else "b"
        words = {"x": f"{batch} h^ w^ c^", "y": f"{batch} y^ z^ c^"}
        write = lambda text: ", ".join(words[w.strip()] for w in text.split(","))  # noqa: E731
        return f"{write(before)} -> {write(after)}"

    return pooling_with_argmax


RULES = (
    rule("MaxPool", pool("x", "y"), mono="max:0"),
    rule("AvgPool", pool("x", "y"), lin="0"),
    rule("MaxPoolV2", pool("x, ., .", "y", window=1), mono="max:0"),
    rule("MaxPool3D", pool("x", "y"), mono="max:0"),
    rule("AvgPool3D", pool("x", "y"), lin="0"),
    rule("MaxPoolGrad", pool("x, y, y", "x"), lin="2"),
    rule("MaxPoolGradV2", pool("x, y, y, ., .", "x", window=3), lin="2"),
    rule("MaxPoolGradGrad", pool("x, y, x", "y"), lin="2"),
    rule("MaxPoolGradGradV2", pool("x, y, x, ., .", "y", window=3), lin="2"),
    rule("MaxPool3DGrad", pool("x, y, y", "x"), lin="2"),
    rule("MaxPool3DGradGrad", pool("x, y, x", "y"), lin="2"),
    rule("AvgPoolGrad", pool("[out0], y", "x"), lin="1"),
    rule("AvgPool3DGrad", pool("[out0], y", "x"), lin="1"),
    rule("MaxPoolWithArgmax", argmax_pool("x", "y, y")),
    rule("MaxPoolGradWithArgmax", argmax_pool("x, y, y", "x"), lin="1"),
    rule("MaxPoolGradGradWithArgmax", argmax_pool("x, x, y", "y"), lin="1"),
)
