"""Evaluates integer and boolean ops in NumPy: the ops that compute shapes, axes and bounds.

``EVALUATORS`` maps an op to its evaluator, which takes the node and the values of its operands (NumPy arrays) and
returns one value per output; None: not known. Operands that do not fit the op raise IndexError or ValueError, as in
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whale.ir.ops import IDENTITIES
from whale.ir.program import Node
from whale.ir.values import find_numpy_dtype

Values = Sequence[np.ndarray]
Evaluator = Callable[[Node, Values], tuple[Any, ...]]


def _out_dtype(node: Node, i: int = 0) -> np.dtype:
    return find_numpy_dtype(node.outputs[i].dtype)


def _unary(f: Callable[[np.ndarray], Any]) -> Evaluator:
    return lambda node, v: (np.asarray(f(v[0]), _out_dtype(node)),)


def _binary(f: Callable[[np.ndarray, np.ndarray], Any]) -> Evaluator:
    def run(node: Node, v: Values) -> tuple[Any, ...]:
        return (np.asarray(f(v[0], v[1]), _out_dtype(node)),)

    return run


def _divide_truncating(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _divides(f: Callable[[np.ndarray, np.ndarray], Any]) -> Evaluator:
    """Makes the evaluator of a division. A division by zero stays in the program, since it is an error at run time."""

    def run(node: Node, v: Values) -> tuple[Any, ...]:
        return (np.asarray(f(v[0], v[1]), _out_dtype(node)),) if np.all(v[1] != 0) else (None,)

    return run


def _reduction(f: Callable[..., Any]) -> Evaluator:
    def run(node: Node, v: Values) -> tuple[Any, ...]:
        axes = tuple(int(a) % v[0].ndim for a in v[1].reshape(-1)) if v[0].ndim else ()
        if v[0].size == 0 and f in (np.max, np.min):
            return (None,)
        return (np.asarray(f(v[0], axis=axes, keepdims=bool(node.attrs.get("keep_dims"))), _out_dtype(node)),)

    return run


def make_strided_index(
    attrs: Any, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, rank: int
) -> tuple[Any, ...]:
    """Returns the NumPy index that is equivalent to a StridedSlice (or its gradient, or assignment).

    Args:
      attrs: the node's attributes, with the masks.
      rank: rank of the sliced tensor.
    """
    masks = {k: int(attrs.get(f"{k}_mask") or 0) for k in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    index: list[Any] = []
    count = len(begin)
    consumed = sum(1 for i in range(count) if not (masks["new_axis"] | masks["ellipsis"]) >> i & 1)
    for i in range(count):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            index.extend([slice(None)] * (rank - consumed))
        elif masks["new_axis"] & bit:
            index.append(None)
        elif masks["shrink_axis"] & bit:
            index.append(int(begin[i]))
        else:
            low = None if masks["begin"] & bit else int(begin[i])
            high = None if masks["end"] & bit else int(end[i])
            index.append(slice(low, high, int(strides[i])))
    return tuple(index)


def _index_strided_slice(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.asarray(v[0][make_strided_index(node.attrs, v[1], v[2], v[3], v[0].ndim)]),)


def _slice(node: Node, v: Values) -> tuple[Any, ...]:
    index = tuple(slice(b, None if n < 0 else b + n) for b, n in zip(v[1].tolist(), v[2].tolist()))
    return (v[0][index],)


def _pack(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.stack(v, axis=node.attrs.get("axis") or 0),)


def _unpack(node: Node, v: Values) -> tuple[Any, ...]:
    axis = node.attrs.get("axis") or 0
    return tuple(np.take(v[0], i, axis=axis) for i in range(len(node.outputs)))


def _split(node: Node, v: Values) -> tuple[Any, ...]:
    return tuple(np.split(v[1], len(node.outputs), axis=int(v[0])))


def _split_v(node: Node, v: Values) -> tuple[Any, ...]:
    axis = int(v[2])
    sizes = v[1].tolist()
    if -1 in sizes:
        sizes[sizes.index(-1)] = v[0].shape[axis] - sum(s for s in sizes if s >= 0)
    return tuple(np.split(v[0], np.cumsum(sizes)[:-1], axis=axis))


def _expand_dims(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.expand_dims(v[0], int(v[1].reshape(-1)[0])),)


def _squeeze(node: Node, v: Values) -> tuple[Any, ...]:
    dims = node.attrs.get("squeeze_dims") or node.attrs.get("axis") or ()
    return (np.squeeze(v[0], axis=tuple(dims) or None),)


def _gather_v2(node: Node, v: Values) -> tuple[Any, ...]:
    axis = int(v[2].reshape(-1)[0])
    if node.attrs.get("batch_dims"):
        return (None,)
    if v[1].size and (v[1].min() < 0 or v[1].max() >= v[0].shape[axis]):
        return (None,)
    return (np.take(v[0], v[1], axis=axis),)


def _gather(node: Node, v: Values) -> tuple[Any, ...]:
    return _gather_v2(node, (v[0], v[1], np.zeros((), np.int32)))


def _range(node: Node, v: Values) -> tuple[Any, ...]:
    numbers = range(int(v[0]), int(v[1]), int(v[2]))
    # The caller keeps small results only, but cannot know the size of this one from the operands' shapes.
    return (np.array(numbers, _out_dtype(node)) if len(numbers) <= 1 << 16 else None,)


def _fill(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.full(tuple(v[0].tolist()), v[1]),)


def _invert_permutation(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.argsort(v[0]).astype(v[0].dtype),)


def broadcast_gradient_args(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the axes over which the gradients of two broadcast operands of shapes ``a`` and ``b`` are summed, for
    each operand.

    An axis where both have size 1 is listed for both, as TensorFlow's BCast does; so are the leading axes that an
    operand lacks. Equal shapes need no sums: ([], []).
    """
    if list(a) == list(b):
        return [], []
    rank = max(len(a), len(b))
    left = [1] * (rank - len(a)) + list(a)
    right = [1] * (rank - len(b)) + list(b)
    return [i for i in range(rank) if left[i] == 1], [i for i in range(rank) if right[i] == 1]


def _broadcast_gradient_args(node: Node, v: Values) -> tuple[Any, ...]:
    a, b = broadcast_gradient_args(v[0].tolist(), v[1].tolist())
    return np.array(a, _out_dtype(node)), np.array(b, _out_dtype(node, 1))


def _broadcast_args(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.array(np.broadcast_shapes(tuple(v[0].tolist()), tuple(v[1].tolist())), _out_dtype(node)),)


def _concat_offset(node: Node, v: Values) -> tuple[Any, ...]:
    axis = int(v[0])
    offset = 0
    results = []
    for shape in v[1:]:
        result = np.zeros_like(shape)
        result[axis] = offset
        offset += int(shape[axis])
        results.append(result)
    return tuple(results)


def _select(node: Node, v: Values) -> tuple[Any, ...]:
    condition = v[0]
    if node.op == "Select" and 0 < condition.ndim < v[1].ndim:
        condition = condition.reshape(condition.shape + (1,) * (v[1].ndim - condition.ndim))
    return (np.where(condition, v[1], v[2]),)


def _concat(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.concatenate(v[:-1], axis=int(v[-1])),)


def _cumulative(f: Callable[..., Any]) -> Evaluator:
    def run(node: Node, v: Values) -> tuple[Any, ...]:
        if node.attrs.get("exclusive") or node.attrs.get("reverse"):
            return (None,)
        return (np.asarray(f(v[0], axis=int(v[1])), _out_dtype(node)),)

    return run


def _reverse(node: Node, v: Values) -> tuple[Any, ...]:
    return (np.flip(v[0], axis=tuple(v[1].reshape(-1).tolist())),)


EVALUATORS: dict[str, Evaluator] = {
    **dict.fromkeys(IDENTITIES, lambda node, v: (v[0],)),
    "Add": _binary(np.add),
    "AddV2": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Div": _divides(_divide_truncating),
    "TruncateDiv": _divides(_divide_truncating),
    "FloorDiv": _divides(np.floor_divide),
    "FloorMod": _divides(np.mod),
    "Mod": _divides(np.fmod),
    "TruncateMod": _divides(np.fmod),
    "Maximum": _binary(np.maximum),
    "Minimum": _binary(np.minimum),
    "Neg": _unary(np.negative),
    "Abs": _unary(np.abs),
    "Sign": _unary(np.sign),
    "Square": _unary(np.square),
    "Cast": _unary(lambda x: x.astype(np.int64) if x.dtype == bool else x),
    "Equal": _binary(np.equal),
    "NotEqual": _binary(np.not_equal),
    "Less": _binary(np.less),
    "LessEqual": _binary(np.less_equal),
    "Greater": _binary(np.greater),
    "GreaterEqual": _binary(np.greater_equal),
    "LogicalAnd": _binary(np.logical_and),
    "LogicalOr": _binary(np.logical_or),
    "LogicalNot": _unary(np.logical_not),
    "Prod": _reduction(np.prod),
    "Sum": _reduction(np.sum),
    "Max": _reduction(np.max),
    "Min": _reduction(np.min),
    "All": _reduction(np.all),
    "Any": _reduction(np.any),
    "Cumsum": _cumulative(np.cumsum),
    "Cumprod": _cumulative(np.cumprod),
    "StridedSlice": _index_strided_slice,
    "Slice": _slice,
    "Pack": _pack,
    "Unpack": _unpack,
    "Split": _split,
    "SplitV": _split_v,
    "ConcatV2": _concat,
    "Reshape": lambda node, v: (v[0].reshape(tuple(v[1].tolist())),),
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Transpose": lambda node, v: (np.transpose(v[0], v[1].tolist()),),
    "Tile": lambda node, v: (np.tile(v[0], v[1].tolist()),),
    "BroadcastTo": lambda node, v: (np.broadcast_to(v[0], tuple(v[1].tolist())),),
    "ReverseV2": _reverse,
    "GatherV2": _gather_v2,
    "Gather": _gather,
    "Range": _range,
    "Fill": _fill,
    "InvertPermutation": _invert_permutation,
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "BroadcastArgs": _broadcast_args,
    "ConcatOffset": _concat_offset,
    "Select": _select,
    "SelectV2": _select,
    "ZerosLike": lambda node, v: (np.zeros_like(v[0]),),
    "OnesLike": lambda node, v: (np.ones_like(v[0]),),
}
