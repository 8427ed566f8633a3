"""Gathers and scatters by index: cut by index rows or by the dimensions that indices do not reach."""

from __future__ import annotations

from whale.rules.base import OpView
from whale.rules.dims import axis, names, term, terms
from whale.rules.notation import REPLICATED
from whale.rules.registry import rule


def gather(op: OpView) -> str:
    """axis and batch_dims; the indexed dimension is whole"""
    params, indices = op.inputs[0].shape, op.inputs[1].shape
    if params is None or indices is None:
        return REPLICATED
    at = axis(op, 2, len(params))
    if at is None:
        return REPLICATED
    batch = int(op.attr("batch_dims", 0)) % max(len(indices), 1) if op.attr("batch_dims", 0) else 0
    b, i = names("b", batch), names("i", len(indices) - batch)
    before, after = names("p", at - batch), names("q", len(params) - at - 1)
    return f"{terms([*b, *before, 'v^', *after], [*b, *i])}, . -> {term([*b, *before, *i, *after])}"


def _depth(op: OpView) -> int | None:
    """How many dimensions an index tuple addresses: the last size of the indices."""
    shape = op.inputs[0 if op.node.op == "ScatterNd" else 1].shape
    return shape[-1] if shape else None


def _addressed(op: OpView) -> str | None:
    depth = _depth(op)
    return None if depth is None else " ".join([f"v{n}^" for n in range(depth)] + ["q*"])


def gather_nd(op: OpView) -> str:
    """the number of dimensions an index addresses"""
    params = _addressed(op)
    return REPLICATED if params is None else f"{params}, i* k^ -> i* q*"


def resource_gather(op: OpView) -> str:
    """batch_dims (the variable stays whole)"""
    batch = int(op.attr("batch_dims", 0))
    if op.inputs[1].shape is None or op.outputs[0].shape is None:
        return REPLICATED
    b = " ".join(f"b{n}^" for n in range(batch))
    return f"., {b} i* -> {b} i* q*^"


def scatter_nd(op: OpView) -> str:
    """the number of dimensions an index addresses"""
    result = _addressed(op)
    return REPLICATED if result is None else f"i*+ k^, i*+ q*, [out0] -> {result}"


def tensor_scatter(op: OpView) -> str:
    """the number of dimensions an index addresses"""
    result = _addressed(op)
    return REPLICATED if result is None else f"{result}, i*^ k^, i*^ q* -> {result}"


def tensor_extremum(op: OpView) -> str:
    """the number of dimensions an index addresses; taking a maximum twice changes nothing, so rows can be cut"""
    result = _addressed(op)
    return REPLICATED if result is None else f"{result}, i*+ k^, i*+ q* -> {result}"


def one_hot(op: OpView) -> str:
    """axis"""
    indices = op.inputs[0].shape
    if indices is None:
        return REPLICATED
    labels, at = names("i", len(indices)), int(op.attr("axis", -1))
    at = len(indices) if at == -1 else at
    return f"{term(labels)}, ., ., . -> {term([*labels[:at], 'd^', *labels[at:]])}"


def dynamic_stitch(op: OpView) -> str:
    """the number of operands"""
    count = len(op.inputs) // 2
    indices = [f"i{n}*^" for n in range(count)]
    return f"{', '.join(indices)}, {', '.join(f'{i} q*' for i in indices)} -> n^ q*"


def _data_operands(op: OpView) -> str:
    """All data operands partial at once."""
    count = len(op.inputs) // 2
    return "&".join(str(count + n) for n in range(count))


RULES = (
    rule("GatherV2", gather, copy="0"),
    rule("Gather", "v^ q*, i* -> i* q*", copy="0"),
    rule("GatherNd", gather_nd, copy="0"),
    rule("ResourceGather", resource_gather),
    rule("ResourceGatherNd", "., i* k^ -> i* q*^"),
    rule("ScatterNd", scatter_nd, lin="1"),
    rule("TensorScatterAdd TensorScatterSub ScatterNdNonAliasingAdd", tensor_scatter, lin="0&2"),
    rule("TensorScatterUpdate", tensor_scatter, copy="0&2"),
    rule("TensorScatterMax", tensor_extremum, mono="max:0&2", reduce="max"),
    rule("TensorScatterMin", tensor_extremum, mono="min:0&2", reduce="min"),
    rule("OneHot", one_hot),
    rule("DynamicPartition", "i*^ q*, i*^ -> {n^ q*}", copy="0"),
    rule("DynamicStitch ParallelDynamicStitch", dynamic_stitch, copy=_data_operands),
    rule("InplaceAdd InplaceSub", "v^ q*, i^, i^ q* -> v^ q*", lin="0&2"),
    rule("InplaceUpdate", "v^ q*, i^, i^ q* -> v^ q*", copy="0&2"),
    rule("UnravelIndex", "i*, . -> k^ i*"),
    rule("LowerBound UpperBound", "b n^, b m -> b m"),
    rule("Unique", REPLICATED),
)
