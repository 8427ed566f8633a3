"""Defines sharding rules of pooling, resizing and other image ops, and of their gradients.

They can be sharded by batch and channels; pooling also by rows and columns if windows do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable

from whale.ir.values import Dims
from whale.sharding_rules.base import OpView, make_labels, read_constant, write_term, write_windows
from whale.sharding_rules.registry import rule

_RESIZE = "b h^ w^ c, . -> b y^ x^ c"


def _write_pooled_dims(op: OpView, image: Dims | None, operand: int | None) -> tuple[list[str], list[str]]:
    """Writes the dimensions of an image before a pooling and after it, as two lists of items.

    Dimensions in which windows do not overlap have a common label, so that they are sharded together; others cannot be
    sharded.

    Args:
      image: shape of the image before the pooling.
      operand: number of the operand with the window's size, which the operand with the steps follows; None: both are
        attributes.
    """
    window = list(op.attr("ksize", ())) if operand is None else read_constant(op, operand)
    steps = list(op.attr("strides", ())) if operand is None else read_constant(op, operand + 1)
    if not window or not steps:
        rest = len(str(op.attr("data_format", "NHWC"))) - 1
        return ["b", *(f"{x}^" for x in make_labels("x", rest))], ["b", *(f"{y}^" for y in make_labels("y", rest))]
    before, after = [f"{x}^" for x in make_labels("x", len(window))], [f"{y}^" for y in make_labels("y", len(window))]
    if op.attr("padding") in ("SAME", "VALID"):
        for n, found in enumerate(write_windows(image, window, steps)):
            if found is not None:
                before[n], after[n] = found, f"s{n}"
    return before, after


def make_pool_spec(before: str, after: str, window: int | None = None) -> Callable[[OpView], str]:
    """Returns a function that writes the line of a pooling op or its gradient.

    Args:
      before: the operands, separated by commas: x has the shape of the image before the pooling, y the shape after it;
        other words are terms of the notation.
      after: x or y, for the result.
      window: number of the operand with the window's size; None: it is an attribute.
    """
    operands = [w.strip() for w in before.split(",")]

    def pooling(op: OpView) -> str:
        """Writes the sharding rule of a pooling op, from the window and its steps."""
        image = op.inputs[operands.index("x")] if "x" in operands else op.outputs[0]
        words = dict(zip("xy", map(write_term, _write_pooled_dims(op, image.shape, window))))
        return f"{', '.join(words.get(w, w) for w in operands)} -> {words[after]}"

    return pooling


def make_argmax_pool_spec(before: str, after: str) -> Callable[[OpView], str]:
    """Returns a function that writes the line of pooling with argmax, or of its gradient.

    The flat indices count channels, so these cannot be sharded; nor can the batch with ``include_batch_in_index``.

    Args:
      before: the operands, separated by commas: x has the shape of the image before the pooling, y the shape after it.
      after: likewise the results.
    """

    def pooling_with_argmax(op: OpView) -> str:
        """Writes the sharding rule of pooling with argmax, from ``include_batch_in_index``."""
        batch = "b^" if op.attr("include_batch_in_index", False) else "b"
        words = {"x": f"{batch} h^ w^ c^", "y": f"{batch} y^ z^ c^"}
        write = lambda text: ", ".join(words[w.strip()] for w in text.split(","))  # noqa: E731
        return f"{write(before)} -> {write(after)}"

    return pooling_with_argmax


def projective(op: OpView) -> str:
    """Writes the sharding rule of ImageProjectiveTransform, from whether all images share one transform."""
    shared = op.inputs[1].shape is not None and op.inputs[1].shape[0] == 1 and op.inputs[0].shape != op.inputs[1].shape
    more = ", ." * (len(op.inputs) - 2)
    return f"b h^ w^ c, {'1' if shared else 'b'} k^{more} -> b y^ x^ c"


def _crop_is_linear(op: OpView) -> str | None:
    """Returns ``lin`` of CropAndResize: partial sums pass the image if what lies outside of it is filled with 0, else
    None.
    """
    return None if float(op.attr("extrapolation_value", 0.0)) else "0"


def _is_linear_with_fill(op: OpView) -> str:
    """Returns in which operands ImageProjectiveTransformV3 is linear, in the notation of ``lin=`` in rule lines: in the
    image (``0``), or in image and fill value together (``0&3``) where the fill value is used.

    Partial sums of those operands may pass through the op.
    """
    return "0&3" if op.attr("fill_mode", "CONSTANT") == "CONSTANT" else "0"


RULES = (
    rule("MaxPool", make_pool_spec("x", "y"), mono="max:0"),
    rule("AvgPool", make_pool_spec("x", "y"), lin="0"),
    rule("MaxPoolV2", make_pool_spec("x, ., .", "y", window=1), mono="max:0"),
    rule("MaxPool3D", make_pool_spec("x", "y"), mono="max:0"),
    rule("AvgPool3D", make_pool_spec("x", "y"), lin="0"),
    rule("MaxPoolGrad", make_pool_spec("x, y, y", "x"), lin="2"),
    rule("MaxPoolGradV2", make_pool_spec("x, y, y, ., .", "x", window=3), lin="2"),
    rule("MaxPoolGradGrad", make_pool_spec("x, y, x", "y"), lin="2"),
    rule("MaxPoolGradGradV2", make_pool_spec("x, y, x, ., .", "y", window=3), lin="2"),
    rule("MaxPool3DGrad", make_pool_spec("x, y, y", "x"), lin="2"),
    rule("MaxPool3DGradGrad", make_pool_spec("x, y, x", "y"), lin="2"),
    rule("AvgPoolGrad", make_pool_spec("[out0], y", "x"), lin="1"),
    rule("AvgPool3DGrad", make_pool_spec("[out0], y", "x"), lin="1"),
    rule("MaxPoolWithArgmax", make_argmax_pool_spec("x", "y, y")),
    rule("MaxPoolGradWithArgmax", make_argmax_pool_spec("x, y, y", "x"), lin="1"),
    rule("MaxPoolGradGradWithArgmax", make_argmax_pool_spec("x, x, y", "y"), lin="1"),
    rule("ResizeBilinear ResizeBicubic ResizeArea", _RESIZE, lin="0"),
    rule("ResizeNearestNeighbor", _RESIZE, copy="0"),
    rule("ResizeBilinearGrad ResizeBicubicGrad", "b y^ x^ c, ~b h^ w^ c -> b h^ w^ c", lin="0"),
    rule("ResizeNearestNeighborGrad", "b y^ x^ c, . -> b h^ w^ c", lin="0"),
    rule("ScaleAndTranslate", "b h^ w^ c, ., ., . -> b y^ x^ c", lin="0"),
    rule("ScaleAndTranslateGrad", "b y^ x^ c, ~b h^ w^ c, ., . -> b h^ w^ c", lin="0"),
    rule("CropAndResize", "b^ h^ w^ c, n r^, n, . -> n y^ x^ c", lin=_crop_is_linear),
    rule("CropAndResizeGradImage", "n+ y^ x^ c^, n+ r^, n+, . -> b^ h^ w^ c^", lin="0"),
    rule("CropAndResizeGradBoxes", "n y^ x^ c+, b^ h^ w^ c+, n r^, n -> n r^", lin="0|1"),
    rule("AdjustContrastv2", "* h^ w^ c, . -> * h^ w^ c", lin="0"),
    rule("AdjustHue AdjustSaturation", "* c^, . -> * c^"),
    rule("RGBToHSV HSVToRGB", "* c^ -> * c^"),
    rule("ExtractImagePatches", "b h^ w^ c^ -> b y^ x^ d^", lin="0"),
    rule("ExtractVolumePatches", "b h^ w^ z^ c^ -> b y^ x^ u^ d^", lin="0"),
    rule("ImageProjectiveTransformV2", projective, lin="0"),
    rule("ImageProjectiveTransformV3", projective, lin=_is_linear_with_fill),
    rule("DrawBoundingBoxes", "b h^ w^ c^, b n^ k^ -> b h^ w^ c^"),
    rule("DrawBoundingBoxesV2", "b h^ w^ c^, b n^ k^, . -> b h^ w^ c^"),
    rule("CombinedNonMaxSuppression", "b n^ q^ k^, b n^ c^, ., ., ., . -> b m^ k^, b m^, b m^, b"),
)
