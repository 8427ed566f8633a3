"""Normalisations. Training batch norm is cut by channels only: its statistics are over the whole batch (the form that
is cut by batch is decomposed elsewhere)."""

from __future__ import annotations

from whale.rules.base import OpView
from whale.rules.convolution import image
from whale.rules.registry import rule


def _channels(op: OpView, i: int, c: str) -> str:
    """The term of a per-channel operand, which may be empty."""
    shape = op.inputs[i].shape
    return "." if shape == (0,) else c


def _default(op: OpView) -> str:
    shape = op.inputs[0].shape
    return "NDHWC" if shape is not None and len(shape) == 5 else "NHWC"


def fused_batch_norm(op: OpView) -> str:
    """is_training, data_format"""
    training = op.attr("is_training", True)
    b = "b^" if training else "b"
    x = image(op, "x", "c", b, _default(op))
    moments = ", ".join(_channels(op, i, "c") for i in (3, 4))
    outs = ["=c"] * 4
    if len(op.outputs) == 6:
        outs.append("=c" if op.outputs[5].shape is None else "=.")  # opaque: what a channel's gradient needs again
    return f"{x}, c, c, {moments} -> {x}, {', '.join(outs)}"


def fused_batch_norm_grad(op: OpView) -> str:
    """is_training, data_format"""
    training = op.attr("is_training", True)
    b = "b^" if training else "b+"
    x = image(op, "x", "c", b, _default(op))
    reserve = [_channels(op, i, "c") for i in (3, 4)]
    if len(op.inputs) == 6:
        reserve.append("c" if op.inputs[5].shape is None else ".")
    return f"{x}, {x}, c, {', '.join(reserve)} -> {image(op, 'x', 'c', b.rstrip('+'), _default(op))}, c, c, =., =."


RULES = (
    rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", fused_batch_norm),
    rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", fused_batch_norm_grad, lin="0"),
    rule("BatchNormWithGlobalNormalization", "b h w c, c, c, c, c -> b h w c"),
    rule("LRN", "b h w c^ -> b h w c^"),
    rule("LRNGrad", "b h w c^, b h w c^, b h w c^ -> b h w c^", lin="0"),
)
