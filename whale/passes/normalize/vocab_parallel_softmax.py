"""Decomposes softmax, log-softmax and softmax cross-entropy into simple ops, so that the classes can be sharded.

With m = max(x), s = sum(exp(x - m)) over the classes: softmax = exp(x - m) / s, log-softmax = x - m - log(s), and the
cross-entropy of label k is log(s) - (x[k] - m) with the gradient softmax - one_hot(k). If classes are sharded, m, s and
x[k] are reduced over the ranks (one number per example each), and the logits are not moved.
"""

from __future__ import annotations

import numpy as np

from whale.ir.ops import SOFTMAXES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims, DType, TensorType
from whale.passes.normalize.emitter import NodeEmitter

_SPARSE = "SparseSoftmaxCrossEntropyWithLogits"
_DENSE = "SoftmaxCrossEntropyWithLogits"


def is_softmax(program: Program, node: Node) -> bool:
    """Returns True if the node is a softmax, log-softmax or softmax cross-entropy of a known number of classes, which
    ``softmax`` can decompose.

    Of dense labels all sizes have to be known, since they may broadcast with the logits.
    """
    if node.op == _DENSE:
        return all(t.is_static for t in (*node.outputs, *map(program.find_type, node.inputs)))
    if node.op not in SOFTMAXES and node.op != _SPARSE:
        return False
    logits = program.find_type(node.inputs[0]).shape
    return bool(logits) and (logits or ())[-1] is not None


def softmax(emit: NodeEmitter) -> list[Ref]:
    """Adds simple nodes that compute the results of the emitter's softmax node; returns one tensor, or loss and
    gradient for a cross-entropy.
    """
    node = emit.node
    kind = emit.dtype
    if kind in ("float16", "bfloat16"):
        emit.dtype = "float32"
    x = emit.cast("logits", node.inputs[0], emit.dtype)
    shape = (node.outputs[-1] if node.op == _DENSE else emit.type_of(x)).shape or ()
    if emit.type_of(x).shape != shape:
        sizes = emit.const("shape", np.array(shape, np.int32))
        x = emit.add("spread_logits", "BroadcastTo", (x, sizes), shape, Tidx=DType("int32"))
    z = emit.binary("shifted", "Sub", x, _reduce_over_classes(emit, "whale_max", "Max", x))
    e = emit.add("exp", "Exp", (z,), shape)
    s = _reduce_over_classes(emit, "sum", "Sum", e)
    if node.op == "Softmax":
        return [emit.cast("softmax", emit.binary("ratio", "RealDiv", e, s), kind)]
    log = emit.add("log", "Log", (s,), (*shape[:-1], 1))
    if node.op == "LogSoftmax":
        return [emit.cast("log_softmax", emit.binary("difference", "Sub", z, log), kind)]
    p = emit.binary("softmax", "RealDiv", e, s)
    loss, gradient = (_sparse if node.op == _SPARSE else _dense)(emit, z, log, p, shape)
    return [emit.cast("loss", loss, kind), emit.cast("gradient", gradient, kind)]


def _sparse(emit: NodeEmitter, z: Ref, log: Ref, p: Ref, shape: Dims) -> tuple[Ref, Ref]:
    """Computes loss and gradient for integer labels; for a label that is no class the loss is NaN, as on a GPU.

    Args:
      z: logits minus their maximum.
      log: logarithm of the sum of exp(z), [.., 1].
      p: the softmax.
      shape: shape of the logits.
    """
    labels = emit.node.inputs[1]
    kind = emit.type_of(labels).dtype
    classes = shape[-1]
    assert classes is not None, emit.node.name
    depth = emit.const("classes", np.array(classes, np.int32))
    flags = [emit.const(name, np.array(value)) for name, value in (("on", True), ("off", False))]
    hot = {"TI": DType(kind), "axis": -1}
    is_label = emit.add("is_label", "OneHot", (labels, depth, *flags), shape, "bool", **hot)
    zero = emit.scalar("zero", 0.0)
    picked = emit.add("label_only", "SelectV2", (is_label, z, zero), shape)
    picked = emit.reduce_over("label", "Sum", picked, (len(shape) - 1,), keep=False)
    log = emit.add("log_row", "Squeeze", (log,), shape[:-1], squeeze_dims=(len(shape) - 1,))
    loss = emit.binary("difference", "Sub", log, picked)
    low = _compare(emit, "not_negative", "GreaterEqual", labels, 0)
    high = _compare(emit, "a_class", "Less", labels, classes)
    valid = emit.node_of("valid", "LogicalAnd", (low, high), TensorType("bool", shape[:-1]), {})
    loss = emit.add("or_nan", "SelectV2", (valid, loss, emit.scalar("nan", np.nan)), shape[:-1])
    one = emit.cast("one_hot", is_label, emit.dtype)
    return loss, emit.binary("slope", "Sub", p, one)


def _dense(emit: NodeEmitter, z: Ref, log: Ref, p: Ref, shape: Dims) -> tuple[Ref, Ref]:
    """Computes loss and gradient for labels that are distributions; a class of probability 0 adds nothing, even with an
    infinite logit.

    Args:
      z, log, p, shape: as of ``_sparse``.
    """
    labels = emit.cast("labels", emit.node.inputs[1], emit.dtype)
    cost = emit.binary("cost", "Sub", log, z)
    weighted = emit.add("weighted", "MulNoNan", (cost, labels), shape)
    loss = emit.reduce_over("total", "Sum", weighted, (len(shape) - 1,), keep=False)
    return loss, emit.binary("slope", "Sub", p, labels)


def _compare(emit: NodeEmitter, name: str, op: str, labels: Ref, bound: int) -> Ref:
    t = emit.type_of(labels)
    limit = emit.const(f"{name}/bound", np.array(bound, t.dtype))
    return emit.node_of(name, op, (labels, limit), TensorType("bool", t.shape), {"T": DType(t.dtype)})


def _reduce_over_classes(emit: NodeEmitter, name: str, op: str, x: Ref) -> Ref:
    return emit.reduce_over(name, op, x, (len(emit.type_of(x).shape or ()) - 1,), keep=True)
