"""Quantisation that is emulated in floating point, and its gradients."""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def quantise_range(op: OpView) -> str:
    """whether the range is given (else it is found in all the data) and for the whole tensor"""
    if int(op.attr("axis", -1)) != -1:
        return REPLICATED
    more = ", ." * (len(op.inputs) - 3)
    return f"p*, ., .{more} -> p*" if op.attr("range_given", False) else f"p*^, ~., ~.{more} -> p*^"


RULES = (
    rule("FakeQuantWithMinMaxArgs", "* -> *", mono="0"),
    rule("FakeQuantWithMinMaxArgsGradient", "*, * -> *", lin="0"),
    rule("FakeQuantWithMinMaxVars", "p*, ., . -> p*", mono="0"),
    rule("FakeQuantWithMinMaxVarsGradient", "p*+, p*+, ., . -> p*, ., .", lin="0"),
    rule("FakeQuantWithMinMaxVarsPerChannel", "p* c, c, c -> p* c", mono="0"),
    rule("FakeQuantWithMinMaxVarsPerChannelGradient", "p*+ c, p*+ c, c, c -> p* c, c, c", lin="0"),
    rule("QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4", quantise_range),
)
