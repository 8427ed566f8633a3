"""Splits a call's arguments into tensors and other Python values, and reads the options of a tf.function.

A trace is made for the shapes of the tensors. The other values are constants of the trace.
"""

from __future__ import annotations

import inspect
import reprlib
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
    """Marks, in ``Arguments.leaves``, the position of one tensor argument: its values are the tensors ``first`` to
    ``first + count - 1`` of ``Arguments.tensors``.

    Attributes:
      first: index of the argument's first tensor.
      count: number of its tensors: 1, or the number of components of a composite tensor.
      composite: the RaggedTensor or SparseTensor that was passed; None for a plain tensor.
    """

    first: int
    count: int
    composite: Any = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """Holds the arguments of a call, split into tensors and other Python values; ``flatten_arguments`` creates it.

    Attributes:
      tensors: tensors, arrays, TensorSpecs and ShardedTensors, in the order of the parameters.
      names: a unique, readable name for each of ``tensors``, made of parameter names and dict keys.
      key: hashable; two calls with equal keys can use the same trace.
      structure: the (args, kwargs) of the call.
      leaves: the flat leaves of ``structure``, with a ``_Slot`` in place of each tensor.
    """

    tensors: tuple[Any, ...]
    names: tuple[str, ...]
    key: Hashable
    structure: Any
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: Sequence[tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the (args, kwargs) of the call with ``tensors`` in place of its own tensors."""
        filled = []
        for leaf in self.leaves:
            if not isinstance(leaf, _Slot):
                filled.append(leaf)
                continue
            part = list(tensors[leaf.first : leaf.first + leaf.count])
            if leaf.composite is None:
                filled.append(part[0])
            else:
                kind = leaf.composite if all(map(_has_sizes, part)) else _without_sizes(leaf.composite)
                filled.append(tf.nest.pack_sequence_as(kind, part, expand_composites=True))
        args, kwargs = tf.nest.pack_sequence_as(self.structure, filled)
        return tuple(args), dict(kwargs)


def _has_sizes(tensor: Any) -> bool:
    return bool(tf.TensorShape(tensor.shape).is_fully_defined())


def _without_sizes(composite: Any) -> tf.TypeSpec:
    """Returns the type of a ragged or sparse tensor without the sizes that it has in this call.

    A trace that is not to know the sizes of its parts must not take the number of rows from the type either.
    """
    kind = composite if isinstance(composite, tf.TypeSpec) else tf.type_spec_from_value(composite)
    return kind._with_tensor_ranks_only()


def read_tracing_options(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the tf.function options of ``fn`` that change what is traced; an empty dict for a plain Python function.

    The keys are ``input_signature``, ``autograph``, ``experimental_autograph_options`` and ``jit_compile``. Options
    that only say how TensorFlow caches traces, such as ``reduce_retracing``, are left out.
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
    is_open: bool = False,
) -> Arguments:
    """Splits the arguments of ``fn(*args, **kwargs)`` into tensors and other Python values.

    Tensors, NumPy arrays and scalars, TensorSpecs, ShardedTensors and the parts of composite tensors count as tensors.
    All other values, tf.Variables included, become constants of the trace.

    Args:
      signature: the input_signature of a tf.function. Arguments that it covers are first converted to tensors of its
        dtypes. Where it leaves a size open, the argument's size is taken.
      draws: True if batches are drawn from iterators among the arguments; such an iterator is kept as a Python value.
      is_open: True if shapes need not be fully known.

    Raises:
      CaptureError: a tensor's shape is not fully known, ``fn`` does not take such arguments, or an argument does not
        fit ``signature``.
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
            expected="the arguments that the function's parameters name",
            action="pass the arguments that the function's signature has",
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
            tensors.append(leaf if is_open else _check_static(leaf, path))
            labels.append(path)
            key.append(_make_tensor_key(leaf))
        elif draws and is_iterator(leaf):
            leaves.append(leaf)
            key.append(("iterator", type(leaf), repr(getattr(leaf, "element_spec", None))))
        elif isinstance(leaf, tf.__internal__.CompositeTensor):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            leaves.append(_Slot(len(tensors), len(parts), leaf))
            tensors.extend(p if is_open else _check_static(p, path) for p in parts)
            labels.extend(f"{path}_{i}" for i in range(len(parts)))
            key.append((tf.type_spec_from_value(leaf), *map(_make_tensor_key, parts)))
        else:
            leaves.append(leaf)
            key.append(_make_value_key(leaf))
    skeleton = tf.nest.map_structure(lambda _: 0, structure)
    return Arguments(tuple(tensors), make_distinct_names(labels), (repr(skeleton), *key), structure, tuple(leaves))


def describe_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns (args, kwargs) with a TypeSpec in place of each tensor and iterator, as ``get_concrete_function`` takes
    them.
    """
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
    """Converts the arguments in ``bound``, in the order of parameters, to tensors of the dtypes in ``signature``."""
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
            "the function's input_signature describes more arguments than the call passes",
            op=op,
            given=", ".join(bound.arguments) or "no arguments",
            expected=f"an argument for {wanted[0]}",
            action="pass this argument too, or remove its spec from the input_signature",
        )


def _cast(value: Any, wanted: Any, path: str) -> Any:
    """Converts a structure of values to tensors of the specs in ``wanted``, which has the same structure."""
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
        given=given if isinstance(given, str) else reprlib.repr(given),
        expected=expected,
        action="pass a value of the expected structure, shape and dtype, or change the input_signature",
    )


def _list_paths(positional: list[Any], keywords: dict[str, Any], names: list[str], bound: Any) -> list[tuple[str, Any]]:
    """Returns (readable name, leaf) for each leaf, in the order of tf.nest.flatten((positional, keywords)).

    Args:
      positional: the positional arguments.
      keywords: the keyword arguments.
      names: names of the function's positional parameters.
      bound: the arguments bound to the function's signature (inspect.BoundArguments).
    """
    found: list[tuple[str, Any]] = []
    variadic = [n for n, p in bound.signature.parameters.items() if p.kind is p.VAR_POSITIONAL]
    for i, value in enumerate(positional):
        name = names[i] if i < len(names) and names[i] not in variadic else f"{variadic[0]}_{i}"
        found += list_named_leaves(name, value)
    for name in sorted(keywords):
        found += list_named_leaves(name, keywords[name])
    return found


def list_named_leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns (readable name, leaf) for each leaf of ``value``, in the order of tf.nest.flatten.

    Example: ``list_named_leaves("x", {"a": 1, "b": (2, 3)})`` -> ``[("x_a", 1), ("x_b_0", 2), ("x_b_1", 3)]``.
    """
    flat = tf.nest.flatten(value)
    if len(flat) == 1 and flat[0] is value:
        return [(name, value)]
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in list_named_leaves(f"{name}_{key}", value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for i, item in enumerate(value) for leaf in list_named_leaves(f"{name}_{i}", item)]
    return [(f"{name}_{i}", leaf) for i, leaf in enumerate(flat)]


def make_distinct_names(labels: list[str]) -> tuple[str, ...]:
    """Returns the labels as identifiers, with a number appended to those that occur twice."""
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
            expected="a TensorSpec with a size for every dimension",
            action="give all sizes; dimension 0 of a batch is the size of the global batch",
        )
    return value


def _make_tensor_key(value: Any) -> Hashable:
    if isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return ("tensor", value.dtype.name, tuple(value.shape.as_list()))
    if isinstance(value, ShardedTensor):
        return ("part", value.dtype.name, value._shape_tuple())
    return ("tensor", tf.dtypes.as_dtype(value.dtype).name, tuple(value.shape))


class _ByIdentity:
    """Wraps an unhashable argument so that it compares by identity in a trace's key.

    The wrapper keeps the object alive, so that no other object gets the same id.
    """

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
