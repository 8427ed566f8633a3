"""Decodes the attributes of a NodeDef to plain Python values (``whale.ir.values``), each one when it is first read.

The module also defines marks: boolean attributes such as ``_whale_backward``, which Whale sets on TensorFlow nodes
while a step is traced (e.g. on nodes of the backward pass), and which become the ``marks`` of the program's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from functools import cache, lru_cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.values import DType, Func, Shape, SharedAttrs, Tensor

SCOPE_ATTR = "_whale_scope"  # on nodes and variables (as Python objects): the path of the scope they were made under
# Attributes by which a script, or what Whale adds to its graph, marks TensorFlow's nodes; and the marks of
# ``whale.ir.marks`` that they become.
BACKWARD, CHECKPOINT, AGAIN, WIDE = "_whale_backward", "_whale_checkpoint", "_whale_again", "_whale_wide"
UNSCALED, ALL_FINITE = "_whale_unscaled", "_whale_all_finite"
_MARKS = {
    BACKWARD: "backward",
    CHECKPOINT: "checkpoint",
    AGAIN: "compute_again",
    WIDE: "full_precision",
    UNSCALED: "unscaled",
    ALL_FINITE: "all_finite",
}
MARKED = "_whale_marked"  # set together with every mark, so that one look-up tells whether a node has any
LOSS_SCALE = "_whale_loss_scale"  # on the placeholder that a session feeds with the loss scale; never in a program
# On ops that recompute an activation: TensorFlow must not merge them with the op that computed it first.
RECOMPUTED = "_whale_recomputed"
_SMALL_BYTES = 64
# The attributes that TensorFlow adds on its own say nothing about what a node computes, except these.
_KEPT_INTERNAL = frozenset(
    {"_XlaMustCompile", "_lower_using_switch_merge", "_noinline", "_kernel", "_stateful_parallelism"}
)


def mark_attributes(mark: str) -> dict[str, Any]:
    """Returns the attributes (name -> AttrValue proto) that set a mark on TensorFlow nodes, for
    ``tf.Graph._attr_scope``.

    Args:
      mark: an attribute name that this module defines for a mark, such as ``BACKWARD``.
    """
    return {key: AttrValue(b=True) for key in (MARKED, mark)}


def read_marks(attrs: Any) -> Marks:
    """Returns the marks (see the head of this module) that are set on a TensorFlow node, as ``whale.ir.marks.Marks``.

    Args:
      attrs: the node's attribute map, ``NodeDef.attr``.
    """
    if MARKED not in attrs:
        return NO_MARKS
    return _make_marks(tuple([name for key, name in _MARKS.items() if key in attrs]))


@cache
def _make_marks(names: tuple[str, ...]) -> Marks:
    return NO_MARKS.replace_marks(**dict.fromkeys(names, True)) if names else NO_MARKS


@cache
def find_dtype_name(enum: int) -> str:
    """Returns the name of a DataType enum: 1 -> ``float32``; reference types end with ``_ref``."""
    return tf.dtypes.as_dtype(enum).name


@cache
def find_dtype_enum(name: str) -> int:
    """Returns the DataType enum of a dtype's name: ``float32`` -> 1. Inverse of ``find_dtype_name``."""
    return tf.dtypes.as_dtype(name).as_datatype_enum


def decode_shape(proto: Any) -> Shape:
    """Decodes a TensorShapeProto to a Shape (a size of -1 becomes None)."""
    if proto.unknown_rank:
        return Shape(None)
    return Shape(tuple(None if d.size < 0 else d.size for d in proto.dim))


def decode_tensor(proto: Any) -> Tensor:
    """Decodes a TensorProto to a Tensor with one value per element, also if the proto stores one value for all
    elements.
    """
    name = find_dtype_name(proto.dtype)
    shape = tuple(d.size for d in proto.tensor_shape.dim)
    count = int(np.prod(shape, dtype=np.int64))
    if name == "string":
        items = tuple(proto.string_val)
        if len(items) < count:
            items += (items[-1] if items else b"",) * (count - len(items))
        return Tensor("string", shape, items)
    if proto.tensor_content:
        return Tensor(name, shape, proto.tensor_content)
    return Tensor(name, shape, np.ascontiguousarray(tf.make_ndarray(proto)).tobytes())


def decode_text(raw: bytes) -> str | bytes:
    """Returns bytes as a str if they are valid UTF-8, and unchanged otherwise."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def decode_func(proto: Any) -> Func:
    """Decodes a NameAttrList (a function's name and attributes) to a Func, without attributes that begin with "_"."""
    return Func(proto.name, {k: decode(v) for k, v in proto.attr.items() if not k.startswith("_")})


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "b": bool,
    "i": int,
    "f": float,
    "s": decode_text,
    "type": lambda enum: DType(find_dtype_name(enum)),
    "shape": decode_shape,
    "tensor": decode_tensor,
    "func": decode_func,
}


def decode(value: Any) -> Any:
    """Decodes an AttrValue proto to a plain value (see whale.ir.values).

    A list becomes a tuple, ``()`` if it is empty. An AttrValue without a value becomes None.
    """
    # A graph of thousands of nodes has some dozens of types, shapes and small constants.
    return _decode_small(value.SerializeToString()) if value.ByteSize() <= _SMALL_BYTES else _decode_value(value)


@lru_cache(maxsize=4096)
def _decode_small(serialized: bytes) -> Any:
    return _decode_value(AttrValue.FromString(serialized))


def _decode_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "list":
        for field, items in value.list.ListFields():
            return tuple(map(_DECODERS[field.name], items))
        return ()
    if kind is None or kind == "placeholder":
        return None
    return _DECODERS[kind](getattr(value, kind))


class NodeAttrs(Mapping[str, Any]):
    """Maps the attribute names of a NodeDef to decoded values; it is the ``attrs`` of a captured program's node.

    Decoding is lazy: the first access to any attribute decodes all that are small, and a value of more than 64 bytes is
    decoded when it is itself read. Attributes that begin with "_" are left out, unless they change what the node
    computes. The NodeDef belongs to the graph that it was read from and must not be changed. Nodes with equal small
    attributes share one decoded dict.
    """

    __slots__ = ("_known", "node_def")

    def __init__(self, node_def: Any) -> None:
        self.node_def = node_def
        self._known: SharedAttrs | None = None

    @property
    def shared(self) -> SharedAttrs | None:
        """Returns the decoded dict that nodes with equal attributes share, so that passes can cache results by its
        identity.

        Returns None if a value has more than 64 bytes, since such attributes are not shared between nodes.
        """
        known = self._decode_all()
        return None if known.large else known

    def __getitem__(self, key: str) -> Any:
        known = self._known or self._decode_all()
        value = known[key]
        if value is _LARGE:
            value = known[key] = _decode_value(self.node_def.attr[key])
        return value

    def __contains__(self, key: object) -> bool:
        return key in (self._known or self._decode_all())

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of attribute ``key``, or ``default`` if the node has no such attribute."""
        value = (self._known or self._decode_all()).get(key, default)
        return self[key] if value is _LARGE else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._known or self._decode_all())

    def items(self) -> ItemsView[str, Any]:
        """Returns the attributes' names and values; of small ones without a call for each."""
        known = self._known or self._decode_all()
        return super().items() if known.large else known.items()

    def values(self) -> ValuesView[Any]:
        """Returns the attributes' values; small ones without a call for each."""
        known = self._known or self._decode_all()
        return super().values() if known.large else known.values()

    def __len__(self) -> int:
        return len(self._known or self._decode_all())

    def _decode_all(self) -> SharedAttrs:
        known = self._known
        if known is None:
            known = self._known = _decode_node(self.node_def)
        return known

    def __repr__(self) -> str:
        return f"NodeAttrs({dict(self)!r})"


_LARGE = object()  # stands for a value that is not decoded yet


def _decode_node(node_def: Any) -> SharedAttrs:
    """Returns a node's decoded attributes, from a cache if all values are small, since passes read them many times."""
    items = [
        (key, value.SerializeToString() if value.ByteSize() <= _SMALL_BYTES else None)
        for key, value in node_def.attr.items()
        if key[0] != "_" or key in _KEPT_INTERNAL
    ]
    if all(data is not None for _, data in items):
        return _share(tuple(items))
    found = {key: _LARGE if data is None else _decode_small(data) for key, data in items}
    return SharedAttrs(found, large=True)


@lru_cache(maxsize=4096)
def _share(items: tuple[tuple[str, Any], ...]) -> SharedAttrs:
    return SharedAttrs({key: _decode_small(data) for key, data in items})
