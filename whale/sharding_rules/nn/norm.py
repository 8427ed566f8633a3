"""Defines sharding rules of normalisations.

Training batch norm can be sharded by channels, as its statistics are over the whole batch. To shard it by rows, it is
decomposed elsewhere, or each rank takes the statistics of its own rows (``make_per_rank_moments``).
"""

from __future__ import annotations

from whale.ir.layout import P_SUM, B, PerRank, Placement, Shard, Strategy
from whale.ir.ops import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale.sharding_rules.base import OpView
from whale.sharding_rules.nn.convolution import write_image_term
from whale.sharding_rules.registry import rule


def _write_channels_term(op: OpView, i: int, c: str) -> str:
    """Writes the term of operand ``i``, which has one element per channel: ``c``, or "." if the operand is empty."""
    shape = op.inputs[i].shape
    return "." if shape == (0,) else c


def _write_default_line(op: OpView) -> str:
    shape = op.inputs[0].shape
    return "NDHWC" if shape is not None and len(shape) == 5 else "NHWC"


def fused_batch_norm(op: OpView) -> str:
    """Writes the sharding rule of FusedBatchNorm, from ``is_training`` and ``data_format``."""
    training = op.attr("is_training", True)
    unread = "~" if training and float(op.attr("exponential_avg_factor", 1.0)) == 1.0 else ""
    x = _write_image_term(op, "b^" if training else "b")
    moments = ", ".join(unread + _write_channels_term(op, i, "c") for i in (3, 4))
    outs = ["=c"] * 4
    if len(op.outputs) == 6:
        outs.append("=c" if op.outputs[5].shape is None else "=.")  # opaque reserve space, which the gradient reads
    return f"{x}, c, c, {moments} -> {x}, {', '.join(outs)}"


def _write_image_term(op: OpView, batch: str) -> str:
    """Writes the term of an image whose spatial dimensions have the same flag as its batch."""
    default = _write_default_line(op)
    places = [f"s{i}{batch[1:]}" for i in range(len(str(op.attr("data_format", default))) - 2)]
    return write_image_term(op, places, "c", batch, default)


def _is_linear(op: OpView) -> str:
    """Returns ``lin`` of batch norm: partial sums pass scale and offset (operands 1 and 2) together.

    In inference they also pass image, offset and mean (0, 2 and 3) together, to outputs 0, 1 and 3.
    """
    return "1&2" if op.attr("is_training", True) else "1&2|0&2&3>0&1&3"


def _grad_is_linear(op: OpView) -> str:
    """Returns ``lin`` of batch norm's gradient: partial sums pass the incoming gradient (operand 0), or the scale (2)
    to output 0.

    In inference they also pass image and mean (1 and 3) to output 1, alone or together with the scale.
    """
    return "0|2>0" if op.attr("is_training", True) else "0|2>0|1&3>1|1&2&3>0&1"


def fused_batch_norm_grad(op: OpView) -> str:
    """Writes the sharding rule of FusedBatchNormGrad, from ``is_training`` and ``data_format``."""
    training = op.attr("is_training", True)
    x = _write_image_term(op, "b^" if training else "b+")
    reserve = [_write_channels_term(op, i, "c") for i in (3, 4)]
    if len(op.inputs) == 6:
        reserve.append("c" if op.inputs[5].shape is None else ".")
    return f"{x}, {x}, c, {', '.join(reserve)} -> {x.replace('+', '')}, c, c, =., =."


def make_per_rank_moments(op: OpView, rows: Placement) -> Strategy | None:
    """Returns the strategy by which a training batch norm, or its gradient, takes the statistics of each rank's own
    rows.

    Args:
      rows: placement of the image; its dimension 0 has to be sharded.

    Returns:
      the strategy; None for other ops, other placements, or in inference.
    """
    if not op.attr("is_training", True) or not isinstance(rows, Shard) or rows.dim != 0 or not rows.run:
        return None
    own = PerRank(rows.sizes)
    if op.node.op in BATCH_NORMS:
        return Strategy((rows, B, B, B, B), (rows, *[own] * (len(op.outputs) - 1)), "statistics of its own rows")
    if op.node.op in BATCH_NORM_GRADIENTS:
        saved = [own] * (len(op.inputs) - 3)
        return Strategy((rows, rows, B, *saved), (rows, P_SUM, P_SUM, P_SUM, P_SUM), "statistics of its own rows")
    return None


RULES = (
    rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", fused_batch_norm, lin=_is_linear),
    rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", fused_batch_norm_grad, lin=_grad_is_linear),
    rule("BatchNormWithGlobalNormalization", "b h w c, c, c, c, c -> b h w c"),
    rule("LRN", "b h w c^ -> b h w c^"),
    rule("LRNGrad", "b h w c^, b h w c^, b h w c^ -> b h w c^", lin="0"),
)
