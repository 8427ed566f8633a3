"""Decodes the attributes of a NodeDef to plain values when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
MARKED = "_whale_marked"  # beside each of them, so that one look tells whether a node has any
LOSS_SCALE = "_whale_loss_scale"  # of what is fed with the scale of losses; nodes of programs do not have it
# Of what computes an activation again: TensorFlow must not take it for the operation that it repeats.
RECOMPUTED = "_whale_recomputed"
_SMALL_BYTES = 64
# The attributes that TensorFlow adds on its own say nothing about what a node computes, except these.
_KEPT_INTERNAL = frozenset(
    {"_XlaMustCompile", "_lower_using_switch_merge", "_noinline", "_kernel", "_stateful_parallelism"}
)


def mark_attributes(mark: str) -> dict[str, Any]:
    """Returns the attributes that represent a mark on a TensorFlow node: AttrValue protos, by name."""
    return {key: AttrValue(b=True) for key in (MARKED, mark)}


def read_marks(attrs: Any) -> Marks:
    """Returns the marks of a TensorFlow node from its attributes."""
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
    """Inverse of ``find_dtype_name``."""
    return tf.dtypes.as_dtype(name).as_datatype_enum


def decode_shape(proto: Any) -> Shape:
    """Decodes a TensorShapeProto to a Shape (a size of -1 becomes None)."""
    if proto.unknown_rank:
        return Shape(None)
    return Shape(tuple(None if d.size < 0 else d.size for d in proto.dim))


def decode_tensor(proto: Any) -> Tensor:
    """Decodes a TensorProto to a Tensor; compressed protos (one value for all elements) are expanded."""
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
    """Decodes text to str when it is valid UTF-8, and returns the bytes otherwise."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def decode_func(proto: Any) -> Func:
    """Decodes a NameAttrList to a Func."""
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
    """Decodes an AttrValue proto to a plain value (see whale.ir.values); an empty list is ``()``, one unset is None."""
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
    """The attributes of ``node_def``, decoded when the first of them is read; each large value is decoded when it is
    read.

    Internal attributes (leading underscore) that do not change what the node computes are left out. The NodeDef is
    shared with the graph it came from: nobody writes to it. Nodes with equal attributes share what is decoded.
    """

    __slots__ = ("_known", "node_def")

    def __init__(self, node_def: Any) -> None:
        self.node_def = node_def
        self._known: SharedAttrs | None = None

    @property
    def shared(self) -> SharedAttrs | None:
        """Returns the attributes object that equal nodes share; None where a value is large and stays with its node."""
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
        """Returns the value of an attribute, or ``default`` when the node lacks it."""
        value = (self._known or self._decode_all()).get(key, default)
        return self[key] if value is _LARGE else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._known or self._decode_all())

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
    """Returns a node's decoded attributes; they are cached, since passes read those of all nodes many times."""
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
