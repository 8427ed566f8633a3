"""Normalisations. Training batch norm is cut by channels: its statistics are over the whole batch (the form that is cut
by batch is decomposed elsewhere), or each rank's own."""

from __future__ import annotations

from whale.ir.layout import P_SUM, B, Own, Placement, Split, Strategy
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


_FORWARD = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
_BACKWARD = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})


def own_moments(op: OpView, rows: Placement) -> Strategy | None:
    """A training batch norm, or its gradient, whose statistics are those of each rank's rows; None for other ops."""
    if not op.attr("is_training", True) or not isinstance(rows, Split) or rows.dim != 0 or not rows.run:
        return None
    own = Own(rows.sizes)
    if op.node.op in _FORWARD:
        return Strategy((rows, B, B, B, B), (rows, *[own] * (len(op.outputs) - 1)), "statistics of its own rows")
    if op.node.op in _BACKWARD:
        saved = [own] * (len(op.inputs) - 3)
        return Strategy((rows, rows, B, *saved), (rows, P_SUM, P_SUM, P_SUM, P_SUM), "statistics of its own rows")
    return None


RULES = (
    rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", fused_batch_norm),
    rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", fused_batch_norm_grad, lin="0"),
    rule("BatchNormWithGlobalNormalization", "b h w c, c, c, c, c -> b h w c"),
    rule("LRN", "b h w c^ -> b h w c^"),
    rule("LRNGrad", "b h w c^, b h w c^, b h w c^ -> b h w c^", lin="0"),
)
