"""Pooling and its gradients: cut by batch and channels."""

from __future__ import annotations

from collections.abc import Callable

from whale.rules.base import OpView
from whale.rules.convolution import image
from whale.rules.dims import constant
from whale.rules.registry import rule


def _window(op: OpView, operand: int | None) -> tuple[str, str]:
    """Labels of (batch, channels): frozen where the window spans them."""
    sizes = list(op.attr("ksize", ())) if operand is None else constant(op, operand)
    if not sizes:
        return "b", "c^"
    channel = 1 if str(op.attr("data_format", "NHWC")).startswith("NC") else len(sizes) - 1
    return ("b" if sizes[0] == 1 else "b^"), ("c" if sizes[channel] == 1 else "c^")


def pool(before: str, after: str, default: str = "NHWC", window: int | None = None) -> Callable[[OpView], str]:
    """A line whose terms are images before (x) or after (y) the pooling; ``window``: operand that holds its size."""

    def pooling(op: OpView) -> str:
        """data_format and the window"""
        batch, channels = _window(op, window)
        c, b = (w if w in ("b", "c") else f"y{w}" for w in (channels, batch))
        words = {"x": image(op, "x", channels, batch, default), "y": image(op, "y", c, b, default)}
        write = lambda text: ", ".join(words.get(w.strip(), w.strip()) for w in text.split(","))  # noqa: E731
        return f"{write(before)} -> {write(after)}"

    return pooling


def argmax_pool(before: str, after: str) -> Callable[[OpView], str]:
    """Pooling with flat indices, which count channels, and the batch if ``include_batch_in_index``."""

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
    rule("MaxPool3D", pool("x", "y", "NDHWC"), mono="max:0"),
    rule("AvgPool3D", pool("x", "y", "NDHWC"), lin="0"),
    rule("MaxPoolGrad", pool("x, y, y", "x"), lin="2"),
    rule("MaxPoolGradV2", pool("x, y, y, ., .", "x", window=3), lin="2"),
    rule("MaxPoolGradGrad", pool("x, y, x", "y"), lin="2"),
    rule("MaxPoolGradGradV2", pool("x, y, x, ., .", "y", window=3), lin="2"),
    rule("MaxPool3DGrad", pool("x, y, y", "x", "NDHWC"), lin="2"),
    rule("MaxPool3DGradGrad", pool("x, y, x", "y", "NDHWC"), lin="2"),
    rule("AvgPoolGrad", pool("[out0], y", "x"), lin="1"),
    rule("AvgPool3DGrad", pool("[out0], y", "x", "NDHWC"), lin="1"),
    rule("MaxPoolWithArgmax", argmax_pool("x", "y, y")),
    rule("MaxPoolGradWithArgmax", argmax_pool("x, y, y", "x"), lin="1"),
    rule("MaxPoolGradGradWithArgmax", argmax_pool("x, x, y", "y"), lin="1"),
)
