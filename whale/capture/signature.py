"""Splits a call's arguments into tensors, for whose shapes a trace is made, and Python values, which are constants of
the trace.

It also reads the keywords with which a tf.function is traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.util import nest

from whale.capture.sharded import ShardedTensor, is_iterator
from whale.errors import CaptureError

_TENSORS = (tf.Tensor, tf.TensorSpec, np.ndarray, np.generic, ShardedTensor)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for ``count`` consecutive tensors in ``arguments`` (several for one composite tensor)."""

    first: int
    count: int
    composite: Any = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call, split into tensors and Python values.

    Attributes:
      tensors: tensors, arrays, TensorSpecs or ranks' parts of tensors, in order of parameters.
      names: a readable name for each, from parameter names and keys.
      key: equal for calls that one trace serves.
    """

    tensors: tuple[Any, ...]
    names: tuple[str, ...]
    key: Hashable
    structure: Any
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: Sequence[tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) of the same call with other tensors."""
        filled = []
        for leaf in self.leaves:
            if not isinstance(leaf, _Slot):
                filled.append(leaf)
                continue
            part = list(tensors[leaf.first : leaf.first + leaf.count])
            if leaf.composite is None:
                filled.append(part[0])
            else:
                filled.append(tf.nest.pack_sequence_as(leaf.composite, part, expand_composites=True))
        args, kwargs = tf.nest.pack_sequence_as(self.structure, filled)
        return tuple(args), dict(kwargs)


def read_tracing_options(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the keywords with which tf.function would trace another function like ``fn``; none for a Python function.

    Only keywords that change what is computed, or how, are among them; the others say what TensorFlow keeps of a trace.
    """
    if not hasattr(fn, "python_function"):
        return {}
    return {
        "input_signature": getattr(fn, "input_signature", None),
        "autograph": bool(getattr(fn, "_autograph", True)),
        "experimental_autograph_options": getattr(fn, "_experimental_autograph_options", None),
        "jit_compile": getattr(fn, "_jit_compile", None),
    }


def flatten_arguments(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Sequence[Any] | None = None,
    draws: bool = False,
) -> Arguments:
    """Splits the arguments of ``fn(*args, **kwargs)`` into tensors and Python values.

    tf.Tensor, NumPy arrays and scalars, TensorSpecs, ShardedTensors and the parts of composite tensors are tensors.
    All other values, variables included, are constants of the trace.

    Args:
      signature: the input_signature of a tf.function: arguments that it covers are converted to tensors of its dtypes
        first. Its unknown sizes are those of the arguments.
      draws: an iterator is not a tensor: its batches are drawn for the step.

    Raises:
      CaptureError: a tensor's shape is not fully known, or ``fn`` does not take such arguments.
    """
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
        if signature is not None:
            bound.apply_defaults()
            _cast_arguments(bound, signature, getattr(fn, "__name__", repr(fn)))
    except TypeError as error:
        raise CaptureError(
            "the function does not take these arguments",
            op=getattr(fn, "__name__", repr(fn)),
            given=str(error),
            action="call it as its signature says",
        ) from error
    positional, keywords = list(bound.args), dict(bound.kwargs)
    names = list(bound.signature.parameters)
    structure = (positional, keywords)
    tensors: list[Any] = []
    labels: list[str] = []
    leaves: list[Any] = []
    key: list[Hashable] = []
    for path, leaf in _list_paths(positional, keywords, names, bound):
        if isinstance(leaf, tf.Variable):
            leaves.append(leaf)
            key.append(("variable", id(leaf)))
        elif isinstance(leaf, _TENSORS):
            leaves.append(_Slot(len(tensors), 1))
            tensors.append(_check_static(leaf, path))
            labels.append(path)
            key.append(_make_tensor_key(leaf))
        elif draws and is_iterator(leaf):
            leaves.append(leaf)
            key.append(("iterator", type(leaf), repr(getattr(leaf, "element_spec", None))))
        elif isinstance(leaf, tf.__internal__.CompositeTensor):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            leaves.append(_Slot(len(tensors), len(parts), leaf))
            tensors.extend(_check_static(p, path) for p in parts)
            labels.extend(f"{path}_{i}" for i in range(len(parts)))
            key.append((tf.type_spec_from_value(leaf), *map(_make_tensor_key, parts)))
        else:
            leaves.append(leaf)
            key.append(_make_value_key(leaf))
    skeleton = tf.nest.map_structure(lambda _: 0, structure)
    return Arguments(tuple(tensors), make_distinct_names(labels), (repr(skeleton), *key), structure, tuple(leaves))


def describe_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns (args, kwargs) with a TypeSpec for each tensor and iterator, as ``get_concrete_function`` takes them."""
    found: tuple[Any, Any] = tf.nest.map_structure(_describe_leaf, (args, kwargs))
    return found


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, tf.Variable | tf.TypeSpec):
        return leaf
    if isinstance(leaf, _TENSORS):
        return tf.TensorSpec(leaf.shape, tf.dtypes.as_dtype(leaf.dtype))
    if is_iterator(leaf):
        return iterator_ops.IteratorSpec(leaf.element_spec)
    return tf.type_spec_from_value(leaf) if isinstance(leaf, tf.__internal__.CompositeTensor) else leaf


def _cast_arguments(bound: inspect.BoundArguments, signature: Sequence[Any], op: str) -> None:
    """Casts the arguments, in the order of parameters, to the dtypes of ``signature``."""
    wanted = list(signature)
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            covered = [_cast(v, wanted.pop(0), f"{name}_{i}") for i, v in enumerate(value[: len(wanted)])]
            bound.arguments[name] = (*covered, *value[len(covered) :])
        elif parameter.kind is not parameter.VAR_KEYWORD and wanted:
            bound.arguments[name] = _cast(value, wanted.pop(0), name)
    if wanted:
        raise CaptureError(
            "the function's input_signature describes more arguments than there are",
            op=op,
            given=", ".join(bound.arguments) or "no arguments",
            expected=f"an argument for {wanted[0]}",
            action="pass it, or change the input_signature",
        )


def _cast(value: Any, wanted: Any, path: str) -> Any:
    """Casts ``value``, a structure, to tensors of the specs in ``wanted``, which has the same structure."""
    try:
        leaves = nest.flatten_up_to(wanted, value, check_types=False)
    except (TypeError, ValueError) as error:
        raise _make_mismatch_error(path, value, wanted) from error
    cast = [_cast_leaf(leaf, spec, path) for leaf, spec in zip(leaves, tf.nest.flatten(wanted))]
    return tf.nest.pack_sequence_as(wanted, cast)


def _cast_leaf(value: Any, wanted: Any, path: str) -> Any:
    if not isinstance(wanted, tf.TensorSpec):
        if isinstance(wanted, tf.TypeSpec) and not wanted.is_compatible_with(value):
            raise _make_mismatch_error(path, value, wanted)
        return value
    if not isinstance(value, (tf.Tensor, tf.TensorSpec, ShardedTensor)):
        try:
            value = tf.convert_to_tensor(value, wanted.dtype)
        except (TypeError, ValueError) as error:
            raise _make_mismatch_error(path, value, wanted) from error
    if value.dtype != wanted.dtype or not wanted.shape.is_compatible_with(value.shape):
        raise _make_mismatch_error(path, f"{value.dtype.name}{value.shape}", f"{wanted.dtype.name}{wanted.shape}")
    return value


def _make_mismatch_error(path: str, given: object, expected: object) -> CaptureError:
    return CaptureError(
        "an argument does not fit the function's input_signature",
        op=path,
        given=given,
        expected=expected,
        action="pass a tensor of that shape and dtype, or change the input_signature",
    )


def _list_paths(positional: list[Any], keywords: dict[str, Any], names: list[str], bound: Any) -> list[tuple[str, Any]]:
    """Returns (readable path, leaf) pairs in the order of tf.nest.flatten((positional, keywords))."""
    found: list[tuple[str, Any]] = []
    variadic = [n for n, p in bound.signature.parameters.items() if p.kind is p.VAR_POSITIONAL]
    for i, value in enumerate(positional):
        name = names[i] if i < len(names) and names[i] not in variadic else f"{variadic[0]}_{i}"
        found += list_named_leaves(name, value)
    for name in sorted(keywords):
        found += list_named_leaves(name, keywords[name])
    return found


def list_named_leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns (readable path, leaf) pairs in the order of tf.nest.flatten."""
    flat = tf.nest.flatten(value)
    if len(flat) == 1 and flat[0] is value:
        return [(name, value)]
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in list_named_leaves(f"{name}_{key}", value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for i, item in enumerate(value) for leaf in list_named_leaves(f"{name}_{i}", item)]
    return [(f"{name}_{i}", leaf) for i, leaf in enumerate(flat)]


def make_distinct_names(labels: list[str]) -> tuple[str, ...]:
    """Turns paths into unique identifiers."""
    seen: set[str] = set()
    result = []
    for label in labels:
        text = "".join(c if c.isalnum() or c == "_" else "_" for c in label).lstrip("_") or "input"
        unique, n = text, 1
        while unique in seen:
            unique, n = f"{text}_{n}", n + 1
        seen.add(unique)
        result.append(unique)
    return tuple(result)


def _check_static(value: Any, path: str) -> Any:
    shape = getattr(value, "shape", None)
    if isinstance(value, tf.TensorSpec) and not tf.TensorShape(shape).is_fully_defined():
        raise CaptureError(
            "the shape of an argument is not fully known",
            op=path,
            given=value,
            expected="a size for every dimension",
            action="give a TensorSpec with all sizes, the global batch included",
        )
    return value


def _make_tensor_key(value: Any) -> Hashable:
    if isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return ("tensor", value.dtype.name, tuple(value.shape.as_list()))
    if isinstance(value, ShardedTensor):
        return ("part", value.dtype.name, value._shape_tuple())
    return ("tensor", tf.dtypes.as_dtype(value.dtype).name, tuple(value.shape))


class _ByIdentity:
    """A wrapper that compares an unhashable object by identity, and keeps it alive so that its id stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _make_value_key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return _ByIdentity(value)
    # True == 1 == 1.0, yet each makes another trace.
    return (type(value), value)
