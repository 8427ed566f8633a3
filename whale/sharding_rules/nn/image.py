"""Image ops: cut by image, and by channel where channels do not mix."""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.registry import rule


def projective(op: OpView) -> str:
    """one transform for all images, or one each"""
    shared = op.inputs[1].shape is not None and op.inputs[1].shape[0] == 1 and op.inputs[0].shape != op.inputs[1].shape
    more = ", ." * (len(op.inputs) - 2)
    return f"b h^ w^ c, {'1' if shared else 'b'} k^{more} -> b y^ x^ c"


def _crop_is_linear(op: OpView) -> str | None:
    """Lets P(sum) pass the image unless what lies outside it is filled with a constant."""
    return None if float(op.attr("extrapolation_value", 0.0)) else "0"


def _is_linear_with_fill(op: OpView) -> str:
    """Lets P(sum) pass the image, together with the fill value where that is an operand."""
    return "0&3" if op.attr("fill_mode", "CONSTANT") == "CONSTANT" else "0"


_RESIZE = "b h^ w^ c, . -> b y^ x^ c"

RULES = (
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
