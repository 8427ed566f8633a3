"""Leaves the number of rows open in what iterators give: a script's are one replica's, the graph computes all."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from whale.frontends.epl.building import is_active

_READS = ("IteratorGetNext", "IteratorGetNextSync")


def patch_iterators() -> None:
    """Patches iterators to give an unknown dimension 0 in graphs of the library's scripts, whatever is told of it."""
    if hasattr(iterator_ops, "_whale_epl"):
        return
    iterator_ops._whale_epl = True
    begin = iterator_ops.Iterator.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if is_active():
            self._element_spec = tf.nest.map_structure(_open_shape, self._element_spec)
            flat = [s.shape for s in tf.nest.flatten(self._element_spec) if isinstance(s, tf.TensorSpec)]
            if len(flat) == len(self._flat_tensor_shapes):
                self._flat_tensor_shapes = flat

    iterator_ops.Iterator.__init__ = __init__
    told = tf.Tensor.set_shape

    @functools.wraps(told)
    def set_shape(self: Any, shape: Any) -> None:
        if is_active() and not hasattr(self, "numpy") and self.op.type in _READS:
            shape = tf.TensorShape(shape)
            shape = tf.TensorShape([None, *shape[1:]]) if shape.rank else shape
        told(self, shape)

    tf.Tensor.set_shape = set_shape


def _open_shape(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, spec.name)
