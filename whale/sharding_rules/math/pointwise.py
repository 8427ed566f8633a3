"""Elementwise ops: each output element depends on the operand elements at its place, with NumPy broadcasting.

``mono``: where the op does not decrease in an operand, P(max) and P(min) pass through it.
"""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def select(op: OpView) -> str:
    """Select: the condition may be a scalar, a vector over dimension 0, or like the rest."""
    condition, then = op.inputs[0].shape, op.inputs[1].shape
    if condition is None or then is None or len(condition) == len(then):
        return "*, *, * -> *"
    return "., *, * -> *" if len(condition) == 0 else "b, b *, b * -> b *"


def bitcast(op: OpView) -> str:
    """Bitcast: the last dimension comes, goes or stays with the sizes of the types."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before is None or after is None or len(before) == len(after):
        return "* -> *"
    return "* n^ -> *" if len(before) > len(after) else "* -> * n^"


def clip_by_value(op: OpView) -> str:
    """ClipByValue: bounds are scalars or like the operand."""
    bounds = [t.shape for t in op.inputs[1:]]
    return "*, ., . -> *" if all(b == () for b in bounds) else "*, *, * -> *"


def quantise_range(op: OpView) -> str:
    """whether the range is given (else it is found in all the data) and for the whole tensor"""
    if int(op.attr("axis", -1)) != -1:
        return REPLICATED
    more = ", ." * (len(op.inputs) - 3)
    return f"p*, ., .{more} -> p*" if op.attr("range_given", False) else f"p*^, ~., ~.{more} -> p*^"


RULES = (
    # One operand, never decreasing, defined everywhere (a part of a maximum may be any smaller number).
    rule(
        "Relu Relu6 Elu Selu LeakyRelu Softplus Softsign Sigmoid Tanh Exp Expm1 Sinh Asinh Atan Erf Floor Ceil Rint "
        "Round Sign",
        "* -> *",
        mono="0",
    ),
    # One operand, others.
    rule(
        "Log Log1p Sqrt Atanh Asin Ndtri Erfinv Acosh Abs Square Rsqrt Reciprocal Inv Acos Cos Cosh Sin Tan Erfc "
        "Lgamma Digamma BesselI0 BesselI0e BesselI1 "
        "BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Dawsn Expint FresnelCos "
        "FresnelSin Spence IsFinite IsInf IsNan Invert PopulationCount ComplexAbs Angle",
        "* -> *",
    ),
    rule(
        "LogicalNot ToBool AsString StringLower StringUpper StringStrip StringLength StaticRegexFullMatch "
        "StaticRegexReplace "
        "EncodeBase64 DecodeBase64 StringToHashBucketFast StringToHashBucketStrong StringToNumber UnicodeScript "
        "Bucketize",
        "* -> *",
    ),
    rule("Bitcast", bitcast),
    # Two operands.
    rule("Maximum", "*, * -> *", mono="0|1|max:0&1"),
    rule("Minimum", "*, * -> *", mono="0|1|min:0&1"),
    rule("LogicalOr", "*, * -> *", mono="0|1|max:0&1"),
    rule("LogicalAnd", "*, * -> *", mono="0|1|min:0&1"),
    rule("Xlogy Xlog1py", "*, * -> *", lin="0"),
    rule(
        "Pow SquaredDifference FloorDiv FloorMod Mod TruncateMod TruncateDiv Atan2 Zeta Polygamma Igamma "
        "Igammac IgammaGradA RandomGammaGrad NextAfter BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift",
        "*, * -> *",
    ),
    rule("Equal NotEqual Less LessEqual Greater GreaterEqual ApproximateEqual", "*, * -> *"),
    rule("Betainc", "*, *, * -> *"),
    rule("Select", select, lin="1&2"),
    rule("SelectV2", "*, *, * -> *", lin="1&2"),
    rule("ClipByValue", clip_by_value, mono="0"),
    # Gradients, linear in the incoming one.
    rule("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad", "*, * -> *", lin="0"),
    rule("SigmoidGrad TanhGrad RsqrtGrad SqrtGrad ReciprocalGrad InvGrad", "*, * -> *", lin="1"),
    # The values do not matter.
    rule("ZerosLike OnesLike", "~* -> *"),
    rule("FakeQuantWithMinMaxArgs", "* -> *", mono="0"),
    rule("FakeQuantWithMinMaxArgsGradient", "*, * -> *", lin="0"),
    rule("FakeQuantWithMinMaxVars", "p*, ., . -> p*", mono="0"),
    rule("FakeQuantWithMinMaxVarsGradient", "p*+, p*+, ., . -> p*, ., .", lin="0"),
    rule("FakeQuantWithMinMaxVarsPerChannel", "p* c, c, c -> p* c", mono="0"),
    rule("FakeQuantWithMinMaxVarsPerChannelGradient", "p*+ c, p*+ c, c, c -> p* c, c, c", lin="0"),
    rule("QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4", quantise_range),
)
