"""Infers static output shapes from the types and known values of operands, for ops that shape arithmetic leads through.

``STATIC_SHAPE`` maps an op to a function (node, type_of, known) that returns the shape of its first output; ``refine``
applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from whale.ir.ops import CROSS_ENTROPIES, IDENTITIES, MATMULS, REDUCTIONS, STREAM_DRAWS
from whale.ir.program import Node, Ref
from whale.ir.values import Dims, TensorType
from whale.passes.normalize.folding.arithmetic import make_strided_index

TypeOf = Callable[[Ref], TensorType]
Known = Callable[[Ref], "np.ndarray | None"]


def _sizes(value: np.ndarray | None) -> Dims | None:
    """Reads the value of a shape operand as dimensions; negative entries (-1, or unknown elements) become None."""
    if value is None or value.ndim != 1:
        return None
    return tuple(None if d < 0 else int(d) for d in value.tolist())


def _shapes(refs: Iterable[Ref], type_of: TypeOf) -> list[Dims] | None:
    """Returns the shapes of ``refs``; None if the rank of one of them is unknown."""
    shapes = []
    for ref in refs:
        shape = type_of(ref).shape
        if shape is None:
            return None
        shapes.append(shape)
    return shapes


def _same(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    return type_of(node.inputs[0]).shape


def _second(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    return type_of(node.inputs[1]).shape


def _broadcast(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shapes = _shapes(node.inputs, type_of)
    if shapes is None:
        return None
    rank = max(len(s) for s in shapes)
    result: list[int | None] = []
    for sizes in zip(*[(1,) * (rank - len(s)) + s for s in shapes]):
        fixed = [d for d in sizes if d is not None and d != 1]
        result.append(fixed[0] if fixed else (None if None in sizes else 1))
    return tuple(result)


def _reshape(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    target = _sizes(known(node.inputs[1]))
    if target is None:
        return None
    dims = list(target)
    source = type_of(node.inputs[0])
    if dims.count(None) == 1 and source.is_static:
        rest = int(np.prod([d for d in dims if d is not None], dtype=np.int64))
        if rest:
            dims[dims.index(None)] = source.elements // rest
    return tuple(dims)


def _operand(i: int) -> Callable[..., Dims | None]:
    return lambda node, type_of, known: _sizes(known(node.inputs[i]))


def _tile(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape, multiples = type_of(node.inputs[0]).shape, _sizes(known(node.inputs[1]))
    if shape is None or multiples is None:
        return None
    return tuple(None if d is None or m is None else d * m for d, m in zip(shape, multiples))


def _slice(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape = type_of(node.inputs[0]).shape
    begin, size = known(node.inputs[1]), known(node.inputs[2])
    if shape is None or size is None:
        return None
    result: list[int | None] = []
    for i, length in enumerate(size.tolist()):
        extent = shape[i]
        if length >= 0:
            result.append(length)
        elif length == -1 and begin is not None and begin[i] >= 0 and extent is not None:
            result.append(extent - int(begin[i]))
        else:
            result.append(None)
    return tuple(result)


def _infer_strided_slice(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape = type_of(node.inputs[0]).shape
    begin, end, strides = (known(r) for r in node.inputs[1:4])
    if shape is None or begin is None or end is None or strides is None:
        return None
    if any((v < -(2**32)).any() for v in (begin, end, strides)):
        return None
    dims = list(shape)
    result: list[int | None] = []
    for item in make_strided_index(node.attrs, begin, end, strides, len(shape)):
        if item is None:
            result.append(1)
            continue
        size = dims.pop(0)
        if isinstance(item, slice):
            if size is not None:
                result.append(len(range(*item.indices(size))))
            else:
                result.append(None)
    return tuple(result + dims)


def _pack(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shapes = [type_of(r).shape for r in node.inputs]
    found = next((s for s in shapes if s is not None), None)
    if found is None:
        return None
    axis = (node.attrs.get("axis") or 0) % (len(found) + 1)
    return found[:axis] + (len(shapes),) + found[axis:]


def _concat(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    axis = known(node.inputs[-1])
    shapes = _shapes(node.inputs[:-1], type_of)
    if axis is None or shapes is None:
        return None
    at = int(axis) % len(shapes[0])
    result = []
    for i, sizes in enumerate(zip(*shapes)):
        if i == at:
            result.append(None if None in sizes else sum(sizes))
        else:
            result.append(next((d for d in sizes if d is not None), None))
    return tuple(result)


def _expand_dims(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape, axis = type_of(node.inputs[0]).shape, known(node.inputs[1])
    if shape is None or axis is None:
        return None
    at = int(axis.reshape(-1)[0])
    at = at + len(shape) + 1 if at < 0 else at
    return shape[:at] + (1,) + shape[at:]


def _squeeze(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape = type_of(node.inputs[0]).shape
    dims = node.attrs.get("squeeze_dims") or node.attrs.get("axis") or ()
    if shape is None or (not dims and None in shape):
        return None
    gone = {d % len(shape) for d in dims} if dims else {i for i, d in enumerate(shape) if d == 1}
    return tuple(d for i, d in enumerate(shape) if i not in gone)


def _transpose(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape, order = type_of(node.inputs[0]).shape, known(node.inputs[1])
    if shape is None or order is None:
        return None
    return tuple(shape[i] for i in order.tolist())


def _reduction(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape, axes = type_of(node.inputs[0]).shape, known(node.inputs[1])
    if shape is None or axes is None:
        return None
    gone = {int(a) % len(shape) for a in axes.reshape(-1)} if shape else set()
    if node.attrs.get("keep_dims"):
        return tuple(1 if i in gone else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in gone)


def _matmul(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    a, b = (type_of(r).shape for r in node.inputs)
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    prefix = "transpose_" if node.op == "MatMul" else "adj_"
    names = ("a", "b") if node.op == "MatMul" else ("x", "y")
    m = a[-1] if node.attrs.get(prefix + names[0]) else a[-2]
    n = b[-2] if node.attrs.get(prefix + names[1]) else b[-1]
    rank = max(len(a), len(b)) - 2
    left = (1,) * (rank - len(a) + 2) + a[:-2]
    right = (1,) * (rank - len(b) + 2) + b[:-2]
    batch = tuple(y if x == 1 else (x if x is not None or y in (1, None) else y) for x, y in zip(left, right))
    return (*batch, m, n)


def _einsum(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    equation = str(node.attrs["equation"]).replace(" ", "")
    shapes = _shapes(node.inputs, type_of)
    operands, _, result = equation.partition("->")
    if shapes is None or "." in equation:
        return None
    sizes: dict[str, int | None] = {}
    for labels, shape in zip(operands.split(","), shapes):
        for label, size in zip(labels, shape):
            sizes[label] = size if sizes.get(label) is None else sizes[label]
    return tuple(sizes.get(label) for label in result)


def _gather(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shapes, axis = _shapes(node.inputs[:2], type_of), known(node.inputs[2])
    if shapes is None or axis is None or node.attrs.get("batch_dims"):
        return None
    at = int(axis) % len(shapes[0])
    return (*shapes[0][:at], *shapes[1], *shapes[0][at + 1 :])


def _arg(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    shape, axis = type_of(node.inputs[0]).shape, known(node.inputs[1])
    if shape is None or axis is None:
        return None
    gone = int(axis) % len(shape)
    return (*shape[:gone], *shape[gone + 1 :])


def _cross_entropy(node: Node, type_of: TypeOf, known: Known) -> list[Dims] | None:
    logits = type_of(node.inputs[0]).shape
    return None if logits is None or len(logits) != 2 else [logits[:1], logits]


def _random(node: Node, type_of: TypeOf, known: Known) -> Dims | None:
    return _sizes(known(node.inputs[0]))


STATIC_SHAPE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (*IDENTITIES, "Neg", "Abs", "Sign", "Square", "Sqrt", "Rsqrt", "Exp", "Log", "Log1p", "Cast",
         "Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Erfc",
         "ZerosLike", "OnesLike", "LogicalNot", "BiasAdd", "Softmax", "LogSoftmax", "Floor", "Round", "Reciprocal",
         "IsFinite", "IsNan", "ReluGrad", "Relu6Grad", "TanhGrad", "SigmoidGrad", "RsqrtGrad", "SqrtGrad", "AddN",
         "Cumsum", "Cumprod", "ReverseV2", "CheckNumerics", "EnsureShape"), _same),
    **dict.fromkeys(
        ("Add", "AddV2", "Sub", "Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "FloorDiv", "FloorMod", "Maximum",
         "Minimum", "Pow", "SquaredDifference", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual",
         "LogicalAnd", "LogicalOr", "SelectV2", "Xlogy", "Xdivy"), _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(MATMULS, _matmul),
    **dict.fromkeys(STREAM_DRAWS, _random),
    "Select": _second,
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    "Einsum": _einsum,
    "GatherV2": _gather,
    "Reshape": _reshape,
    "Fill": _operand(0),
    "BroadcastTo": _operand(1),
    "Conv2DBackpropInput": _operand(0),
    "Tile": _tile,
    "Slice": _slice,
    "StridedSlice": _infer_strided_slice,
    "Pack": _pack,
    "ConcatV2": _concat,
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
}  # fmt: skip


# Functions that return the shape of each output, for ops with several.
STATIC_SHAPES: dict[str, Callable[..., list[Dims] | None]] = dict.fromkeys(CROSS_ENTROPIES, _cross_entropy)


def refine(node: Node, type_of: TypeOf, known: Known) -> tuple[TensorType, ...]:
    """Returns the output types of ``node`` with all sizes that follow from its operands.

    Args:
      type_of: returns the type of an operand.
      known: returns the value of an operand, with a large negative number for unknown elements; None: unknown.
    """
    if node.op in STATIC_SHAPES:
        shapes = STATIC_SHAPES[node.op](node, type_of, known)
        return node.outputs if shapes is None else tuple(map(_merge, node.outputs, shapes))
    shape = STATIC_SHAPE[node.op](node, type_of, known) if node.op in STATIC_SHAPE else None
    return node.outputs if shape is None else (_merge(node.outputs[0], shape), *node.outputs[1:])


def _merge(own: TensorType, shape: Dims) -> TensorType:
    if own.shape is not None:
        if len(own.shape) != len(shape):
            return own
        shape = tuple(b if a is None else a for a, b in zip(own.shape, shape))
    return TensorType(own.dtype, shape)
