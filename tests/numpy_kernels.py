"""NumPy kernels of the ops that hand-written programs use, as unfriendly to empty shares as TensorFlow's on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whale.ir.values import find_numpy_dtype

Array = Any
Kernel = Callable[..., Any]


def _axes(x: Array, axes: Array) -> tuple[int, ...]:
    return tuple(int(a) % max(x.ndim, 1) for a in np.asarray(axes).reshape(-1)) if x.ndim else ()


def _reduce(function: Callable[..., Array], empty: object = None) -> Kernel:
    def kernel(a: Mapping[str, Any], x: Array, axes: Array) -> Array:
        over = _axes(x, axes)
        keep = bool(a.get("keep_dims", False))
        if empty is not None and any(x.shape[d] == 0 for d in over):
            return np.full(np.sum(x, axis=over, keepdims=keep).shape, empty, x.dtype)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(function(x, axis=over, keepdims=keep), x.dtype)

    return kernel


def _mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    count = np.prod([x.shape[d] for d in axis]) if axis else 1
    return np.sum(x, axis=axis, keepdims=keepdims) / np.float64(count)  # no rows: NaN, as the CPU kernel


def _matmul(a: Mapping[str, Any], x: Array, y: Array) -> Array:
    return (x.T if a.get("transpose_a") else x) @ (y.T if a.get("transpose_b") else y)


def _batch_matmul(a: Mapping[str, Any], x: Array, y: Array) -> Array:
    return (x.swapaxes(-1, -2) if a.get("adj_x") else x) @ (y.swapaxes(-1, -2) if a.get("adj_y") else y)


def _slice(a: Mapping[str, Any], x: Array, begin: Array, size: Array) -> Array:
    ends = [n if s == -1 else b + s for b, s, n in zip(begin, size, x.shape)]
    assert all(0 <= b <= e <= n for b, e, n in zip(begin, ends, x.shape)), (x.shape, begin, size)
    return x[tuple(slice(int(b), int(e)) for b, e in zip(begin, ends))]


def _reshape(a: Mapping[str, Any], x: Array, shape: Array) -> Array:
    known = [int(s) for s in shape]
    if -1 in known and x.size == 0:
        known[known.index(-1)] = 0
    return x.reshape(known)


def _pad(a: Mapping[str, Any], x: Array, paddings: Array, value: Array) -> Array:
    return np.pad(x, [tuple(map(int, row)) for row in paddings], constant_values=value)


def _arg_max(a: Mapping[str, Any], x: Array, axis: Array) -> Array:
    if x.size == 0:
        raise AssertionError("ArgMax of an empty tensor: the CPU kernel fails")
    return np.argmax(x, axis=int(axis)).astype(find_numpy_dtype(a.get("output_type", "int64")))


def _unruled_mix(a: Mapping[str, Any], x: Array) -> Array:
    """Every row depends on every row: wrong on a share of the rows."""
    return np.cumsum(x, axis=0) - x.mean(axis=0, keepdims=True)


def _one_hot(a: Mapping[str, Any], indices: Array, depth: Array, on: Array, off: Array) -> Array:
    assert int(a.get("axis", -1)) == -1
    return np.where(indices[..., None] == np.arange(int(depth)), on, off)


def _gather(a: Mapping[str, Any], params: Array, indices: Array, axis: Array) -> Array:
    assert indices.size == 0 or 0 <= indices.min() <= indices.max() < params.shape[int(axis)], (params.shape, indices)
    return np.take(params, indices, axis=int(axis))


def _segment_sum(a: Mapping[str, Any], data: Array, numbers: Array, count: Array) -> Array:
    assert numbers.size == 0 or numbers.max() < count, (numbers, count)
    result = np.zeros((int(count), *data.shape[numbers.ndim :]), data.dtype)
    for where in np.ndindex(numbers.shape):
        if numbers[where] >= 0:
            result[numbers[where]] += data[where]
    return result


def _sparse_cross_entropy(a: Mapping[str, Any], logits: Array, labels: Array) -> tuple[Array, Array]:
    assert labels.size == 0 or 0 <= labels.min() <= labels.max() < logits.shape[1], (logits.shape, labels)
    z = logits - logits.max(-1, keepdims=True)
    hot = labels[:, None] == np.arange(logits.shape[1])
    log = np.log(np.exp(z).sum(-1, keepdims=True))
    return (log - z)[hot], np.exp(z - log) - hot


def _cast(a: Mapping[str, Any], x: Array) -> Array:
    return x.astype(find_numpy_dtype(a["DstT"]))


KERNELS: dict[str, Kernel] = {
    "Identity": lambda a, x: x,
    "StopGradient": lambda a, x: x,
    "IdentityN": lambda a, *xs: xs,
    "Neg": lambda a, x: -x,
    "Abs": lambda a, x: np.abs(x),
    "Square": lambda a, x: x * x,
    "Tanh": lambda a, x: np.tanh(x),
    "TanhGrad": lambda a, y, dy: dy * (1 - y * y),
    "Relu": lambda a, x: np.maximum(x, 0),
    "ReluGrad": lambda a, dy, x: dy * (x > 0),
    "ZerosLike": lambda a, x: np.zeros_like(x),
    "OnesLike": lambda a, x: np.ones_like(x),
    "Cast": _cast,
    "AddV2": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "RealDiv": lambda a, x, y: x / y,
    "Maximum": lambda a, x, y: np.maximum(x, y),
    "Minimum": lambda a, x, y: np.minimum(x, y),
    "Less": lambda a, x, y: x < y,
    "GreaterEqual": lambda a, x, y: x >= y,
    "Equal": lambda a, x, y: x == y,
    "LogicalAnd": lambda a, x, y: x & y,
    "FloorMod": lambda a, x, y: x % y,
    "Exp": lambda a, x: np.exp(x),
    "Log": lambda a, x: np.log(x),
    "MulNoNan": lambda a, x, y: np.where(y == 0, 0, x * np.where(y == 0, 0, y)),
    "OneHot": _one_hot,
    "GatherV2": _gather,
    "UnsortedSegmentSum": _segment_sum,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
    "SelectV2": lambda a, c, x, y: np.where(c, x, y),
    "AddN": lambda a, *xs: sum(xs[1:], start=xs[0]),
    "MatMul": _matmul,
    "BatchMatMulV2": _batch_matmul,
    "BiasAdd": lambda a, x, b: x + b,
    "BiasAddGrad": lambda a, dy: dy.sum(axis=tuple(range(dy.ndim - 1))),
    "Sum": _reduce(np.sum),
    "Mean": _reduce(_mean),
    "Prod": _reduce(np.prod),
    "Max": _reduce(np.max, empty=-np.inf),
    "Min": _reduce(np.min, empty=np.inf),
    "ArgMax": _arg_max,
    "Reshape": _reshape,
    "Transpose": lambda a, x, order: np.transpose(x, [int(d) for d in order]),
    "ExpandDims": lambda a, x, at: np.expand_dims(x, int(at)),
    "Squeeze": lambda a, x: np.squeeze(x, tuple(a["squeeze_dims"])),
    "ConcatV2": lambda a, *xs: np.concatenate(xs[:-1], axis=int(xs[-1])),
    "Pack": lambda a, *xs: np.stack(xs, axis=int(a.get("axis", 0))),
    "Tile": lambda a, x, times: np.tile(x, [int(t) for t in times]),
    "BroadcastTo": lambda a, x, shape: np.broadcast_to(x, [int(s) for s in shape]),
    "Slice": _slice,
    "PadV2": _pad,
    "Fill": lambda a, dims, value: np.full([int(d) for d in dims], value),
    "Shape": lambda a, x: np.array(x.shape, find_numpy_dtype(a.get("out_type", "int32"))),
    "Softmax": lambda a, x: (
        np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
    "StringFormat": lambda a, *xs: np.array(" ".join(map(str, xs)).encode(), object),
    "UnruledMix": _unruled_mix,
}


def run_kernel(op: str, attrs: Mapping[str, Any], operands: list[Array]) -> tuple[Array, ...]:
    """Outputs of a stateless op."""
    result = KERNELS[op](attrs, *operands)
    return tuple(result) if isinstance(result, tuple) else (np.asarray(result),)
