"""Defines sharding rules of elementwise ops, with NumPy broadcasting.

Partial sums pass the operands in which an op is linear (``lin``); partial maxima and minima pass those in which it
never decreases (``mono``).
"""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import FLOATING, Shape
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def select(op: OpView) -> str:
    """Writes the sharding rule of Select, from the shape of the condition.

    The condition is a scalar, a vector over dimension 0, or as large as the other operands.
    """
    condition = op.inputs[0].shape
    like = next((t.shape for t in (*op.inputs[1:], *op.outputs) if t.shape is not None), None)
    if condition is None or like is None:
        return REPLICATED
    if len(condition) == len(like):
        return "*, *, * -> *"
    return "., *, * -> *" if len(condition) == 0 else "b, b *, b * -> b *"


def bitcast(op: OpView) -> str:
    """Writes the sharding rule of Bitcast, from the numbers of dimensions.

    A last dimension appears, disappears or stays, depending on the sizes of the two dtypes.
    """
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before is None or after is None or len(before) == len(after):
        return "* -> *"
    return "* n^ -> *" if len(before) > len(after) else "* -> * n^"


def clip_by_value(op: OpView) -> str:
    """Writes the sharding rule of ClipByValue, whose bounds are scalars or as large as the operand."""
    bounds = [t.shape for t in op.inputs[1:]]
    return "*, ., . -> *" if all(b == () for b in bounds) else "*, *, * -> *"


def quantise_range(op: OpView) -> str:
    """Writes the sharding rule of QuantizeAndDequantize: shardable if one range is given for the whole tensor."""
    if int(op.attr("axis", -1)) != -1:
        return REPLICATED
    more = ", ." * (len(op.inputs) - 3)
    return f"p*, ., .{more} -> p*" if op.attr("range_given", False) else f"p*^, ~., ~.{more} -> p*^"


_NOT_LINEAR = (
    # One operand, never decreasing, and defined everywhere, since a partial maximum may be any smaller number.
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


def _cast_is_linear(op: OpView) -> str | None:
    """Returns ``lin`` of Cast: partial sums pass a Cast between floating types, else None.

    Casts to integers truncate. A Cast to fewer bits before sending (``Marks.rounds_for_wire``) must come after the sum.
    """
    if op.marks.rounds_for_wire:
        return None
    return "0" if op.inputs[0].dtype in FLOATING and op.outputs[0].dtype in FLOATING else None


def _cast_is_monotone(op: OpView) -> str | None:
    """Returns ``mono`` of Cast: partial maxima and minima pass a Cast that keeps the order, to floating types or from
    bool.
    """
    return "0" if op.outputs[0].dtype in FLOATING or op.inputs[0].dtype == "bool" else None


def _div_is_linear(op: OpView) -> str | None:
    """Returns ``lin`` of a division: partial sums pass the numerator if the type is floating; integer division
    rounds.
    """
    return "0" if op.outputs[0].dtype in FLOATING else None


def _add_line(op: OpView) -> str | None:
    """Returns ``lin`` of an addition: partial sums pass if both operands are partial; None for strings, which are
    concatenated.
    """
    return None if op.outputs[0].dtype == "string" else "0&1"


def _find_no_known_outputs(op: OpView, strategy: Strategy, coordinate: int) -> tuple[np.ndarray | None, ...]:
    """Returns None for each output of IdentityN, so that it also runs on empty shards.

    Each operand has its own placement, so that one empty operand does not mean that the others are empty.
    """
    return (None,) * len(op.outputs)


def _set_asserted_shape(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the attribute with the asserted global shape to the local shape."""
    placement, shape = strategy.outputs[0], op.attr("shape")
    if not isinstance(placement, Shard) or not isinstance(shape, Shape) or shape.dims is None:
        return UNCHANGED
    dims = list(shape.dims)
    if dims[placement.dim] is not None:
        dims[placement.dim] = placement.local_size(coordinate)
    return Local(attrs={"shape": Shape(tuple(dims))})


_LINEAR = (
    rule(
        "Identity StopGradient PreventGradient Snapshot RefIdentity DeepCopy Copy CopyHost DebugGradientIdentity "
        "WhaleHold DebugIdentity DebugIdentityV2 GuaranteeConst",
        "* -> *",
        copy="0",
    ),
    rule("EnsureShape PlaceholderWithDefault", "* -> *", copy="0", local=_set_asserted_shape),
    rule("IdentityN", "{?} -> {?}", known=_find_no_known_outputs),
    rule("CheckNumerics CheckNumericsV2", "* -> *", lin="0", mono="0"),
    rule("Neg Conj Real Imag", "* -> *", lin="0"),
    rule("AddV2 Add", "*, * -> *", lin=_add_line, mono="0|1"),
    rule("Sub", "*, * -> *", lin="0&1", mono="0"),
    rule("AddN AccumulateNV2", "{*} -> *", lin="all"),
    rule("Mul MulNoNan", "*, * -> *", lin="0|1"),
    rule("RealDiv Div DivNoNan", "*, * -> *", lin=_div_is_linear),
    rule("Complex", "*, * -> *", lin="0&1"),
    rule("Cast", "* -> *", lin=_cast_is_linear, mono=_cast_is_monotone),
)


RULES = (*_NOT_LINEAR, *_LINEAR)
