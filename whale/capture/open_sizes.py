"""Finds the shapes that tensors of a trace would have on one device, where Whale knows sizes that one device does not.

Whale traces a step for the sizes of its batch. On one device a trace may not know them: an ``input_signature`` with
``None``, a dataset without ``drop_remainder``, Keras. Which trace of a step TensorFlow uses inside another step depends
on what is known there. So the operations that lead from such inputs to a tensor are made again, in a graph beside the
trace, of inputs without these sizes: TensorFlow itself says what it then knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import handle_data_util

from whale.ir.values import Dims

_BESIDE = "_whale_open_sizes"  # attribute of a graph
_TAKES_SIZES = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}  # operation -> its input that lists sizes
_CALLS = ("f", "body", "then_branch", "branches")  # attributes of operations that run functions


def note_open_shape(tensor: tf.Tensor, shape: Dims) -> None:
    """Records the shape that an input of a trace would have on one device.

    Args:
      tensor: an input of a step's graph, of known sizes.
      shape: with None for sizes that one device's trace does not know.
    """
    if tf.TensorShape(shape).rank == tensor.shape.rank and tuple(shape) != tuple(tensor.shape.as_list()):
        _beside(tensor.graph).note(tensor, shape)


def find_open_shape(tensor: Any) -> tf.TensorShape:
    """Returns the shape that one device's trace would know of a tensor: that of the tensor itself, if it does not
    depend on an input that was noted.
    """
    if isinstance(tensor, tf.__internal__.EagerTensor) or not isinstance(tensor, tf.Tensor):
        return tf.TensorShape(tensor.shape)
    found = _beside(tensor.graph).find(tensor)
    return tensor.shape if found is None else found.shape


class _Beside:
    """Holds copies of the operations of a graph that depend on noted inputs.

    Args:
      graph: the graph of a trace, or of a loop or branch in it.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph, self._made = graph, tf.Graph()
        self._copies: dict[str, list[tf.Tensor] | None] = {}  # by operation; None: it depends on no noted input
        self._sizes: set[int] = set()  # of the trace, that one device does not know

    def note(self, tensor: tf.Tensor, shape: Any) -> None:
        known = tensor.shape.as_list()
        self._sizes |= {size for size, other in zip(known, tf.TensorShape(shape).as_list()) if other is None and size}
        self._copies[tensor.op.name] = [self._placeholder(tensor, shape)]

    def find(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the copy of a tensor; None if it depends on no noted input."""
        waiting = [tensor.op]
        while waiting:
            op = waiting[-1]
            missing = [] if op.name in self._copies else [i.op for i in op.inputs if i.op.name not in self._copies]
            if missing and op.type not in ("NextIteration", "Merge"):
                waiting += missing
                continue
            waiting.pop()
            if op.name not in self._copies:
                self._copies[op.name] = self._copy(op)
        copies = self._copies[tensor.op.name]
        return None if copies is None else copies[tensor.value_index]

    def _copy(self, op: tf.Operation) -> list[tf.Tensor] | None:
        if op.type == "Placeholder":
            return self._copy_captured(op)
        copies = [(self._copies.get(i.op.name) or {i.value_index: None})[i.value_index] for i in op.inputs]
        if all(copy is None for copy in copies):
            return None
        if any(name in op.node_def.attr for name in _CALLS) or op.type in ("NextIteration", "Merge"):
            return [self._guess(out) for out in op.outputs]
        with self._made.as_default(), tf_ops.device(None):
            inputs = [self._outside(i) if copy is None else copy for i, copy in zip(op.inputs, copies)]
            at = _TAKES_SIZES.get(op.type)
            if at is not None and copies[at] is None:
                sizes = tf.get_static_value(op.inputs[at])
                if sizes is None:
                    return [self._guess(out) for out in op.outputs]
                inputs[at] = self._open_sizes(op.inputs[at].dtype, sizes)
            attrs = {k: v for k, v in op.node_def.attr.items() if not k.startswith("_")}
            types = [out.dtype for out in op.outputs]
            try:
                return list(self._made._create_op_internal(op.type, inputs, types, attrs=attrs).outputs)
            except ValueError:  # sizes that are in constants of the trace do not fit to each other
                return [self._guess(out) for out in op.outputs]

    def _copy_captured(self, op: tf.Operation) -> list[tf.Tensor] | None:
        """Returns the copy of what a loop's or branch's graph captures from the graph around it."""
        for outer, inner in getattr(self._graph, "captures", ()):
            if inner is op.outputs[0] and isinstance(outer, tf.Tensor) and outer.dtype not in (tf.resource, tf.variant):
                if isinstance(outer, tf.__internal__.EagerTensor):
                    return None
                beside = _beside(outer.graph)
                found = beside.find(outer)
                self._sizes |= beside._sizes
                return None if found is None else [self._placeholder(inner, found.shape)]
        return None

    def _outside(self, tensor: tf.Tensor) -> tf.Tensor:
        value = tf.get_static_value(tensor) if tensor.dtype.is_integer else None
        if value is not None:
            return tf.constant(value, tensor.dtype)
        made = self._placeholder(tensor, tensor.shape)
        if tensor.dtype in (tf.resource, tf.variant):
            handle_data_util.copy_handle_data(tensor, made)
        return made

    def _open_sizes(self, dtype: tf.DType, sizes: Any) -> tf.Tensor:
        """Returns a list of sizes without those that the script took from shapes that one device does not know."""
        if not self._sizes & set(map(int, sizes)):
            return tf.constant(sizes, dtype)
        return tf.stack(
            [tf.compat.v1.placeholder(dtype, []) if int(v) in self._sizes else tf.constant(v, dtype) for v in sizes]
        )

    def _guess(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a copy of a result of a function, without sizes that are equal to one that is not known."""
        rank = tensor.shape.rank
        shape = None if rank is None else [None if size in self._sizes else size for size in tensor.shape.as_list()]
        return self._placeholder(tensor, shape)

    def _placeholder(self, tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        with self._made.as_default():
            return tf.compat.v1.placeholder(tensor.dtype, shape)


def _beside(graph: tf.Graph) -> _Beside:
    found: _Beside | None = getattr(graph, _BESIDE, None)
    if found is None:
        found = _Beside(graph)
        setattr(graph, _BESIDE, found)
    return found


def note_open_shapes(tensors: Sequence[tf.Tensor], shapes: Sequence[Any]) -> None:
    """Does ``note_open_shape`` for tensors and their shapes, if there is a shape for each."""
    if len(tensors) == len(shapes):
        for tensor, shape in zip(tensors, shapes):
            if tf.TensorShape(shape).rank is not None:
                note_open_shape(tensor, tuple(tf.TensorShape(shape).as_list()))
