"""Defers variables until their layout is known: a deferred variable has a handle and a recorded initial value, but no
memory.

The first plan of a program says which part a rank holds, and only that part is allocated. If a script needs the
variable before, or outside of steps (it reads it, or calls a plain tf.function), it gets the whole value, as in plain
TensorFlow.
"""

from __future__ import annotations

import contextvars
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

from whale.runtime.variables.checkpoint_regions import is_restoring_by_regions
from whale.runtime.variables.initializer_recording import record
from whale.runtime.variables.native_reads import make_handle_properties
from whale.runtime.variables.partial_initializers import LITTLE_BYTES, DeferredInitial, Reader, record_uniform_value
from whale.runtime.variables.split_variable import NEED_WHOLE

# True while a step is captured: its graph then refers to handles, and reads of deferred variables compute nothing.
capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_capturing", default=False)
# Bytes of the variable that is created, where they are known without recording what its initializer does.
_known_bytes: contextvars.ContextVar[int | None] = contextvars.ContextVar("whale_known_bytes", default=None)

_PASSED_ON = ("trainable", "name", "constraint", "synchronization", "aggregation")
_OURS = "_whale_defers"
_PLAIN = {"use_resource": (None, True), "validate_shape": (None, True)}


def find_deferred(variable: Any) -> DeferredInitial | None:
    """Returns the recorded initial value of a deferred variable; None if the variable holds a value."""
    return getattr(variable, "_whale_initial", None)


@contextmanager
def announce_size(shape: Sequence[int], dtype: str) -> Iterator[None]:
    """Announces the size of the variable that is created inside this context, for initializers that do not reveal it
    before they run.
    """
    token = _known_bytes.set(math.prod(shape) * int(tf.as_dtype(dtype).size))
    try:
        yield
    finally:
        _known_bytes.reset(token)


def install(wanted: Callable[[int | None], bool]) -> None:
    """Makes this thread defer variables that it creates eagerly from now on, if ``wanted`` returns True.

    The hook stays when the run ends (creators are a stack, of which only the top can be removed), and does nothing
    until the next run replaces it. Functions that are traced have creators of their own.

    Args:
      wanted: called for each variable that is not small, with its bytes, or None if these are not known yet.
    """
    ours = make_creator(wanted)
    setattr(ours, _OURS, True)
    graph = tf.compat.v1.get_default_graph()
    others = [entry for entry in graph._variable_creator_stack if not getattr(entry[1], _OURS, False)]
    graph._variable_creator_stack = [(0, ours), *others]  # asked last, after the user's own


def make_creator(wanted: Callable[[int | None], bool]) -> Callable[..., Any]:
    """Returns a variable creator for TensorFlow that defers variables for which ``wanted`` returns True, and creates
    others as usual.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        size_bytes = _known_bytes.get()
        little = size_bytes is not None and size_bytes <= LITTLE_BYTES
        if little or not tf.executing_eagerly() or not wanted(size_bytes):
            return next_creator(**kwargs)
        return _create_variable(next_creator, kwargs)

    return create


def make_trace_creator(wanted: Callable[[int | None], bool]) -> Callable[..., Any]:
    """Returns a variable creator for traced functions, which defers variables with constant initial values, such as
    optimizer slots.

    tf.function would capture such a variable together with its whole initial value. Variables with random initial
    values are left to TensorFlow, so that the numbers are those of plain TensorFlow.

    Args:
      wanted: as in ``install``.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        size_bytes = _known_bytes.get()
        little = size_bytes is not None and size_bytes <= LITTLE_BYTES
        if not little and wanted(size_bytes) and _is_constant_value(kwargs.get("initial_value"), kwargs.get("dtype")):
            with tf.init_scope():
                initial = _read_initial(kwargs)
                if isinstance(initial, DeferredInitial):
                    return _create_uninitialized(initial, kwargs)
        return next_creator(**kwargs)

    return create


def _is_constant_value(value: Any, dtype: Any) -> bool:
    """Returns True if an initial value depends neither on random numbers nor on tensors of the traced function."""
    if not callable(value):
        return value is not None and not isinstance(value, tf.Variable) and not tf.is_symbolic_tensor(value)
    graph = func_graph.FuncGraph("whale_constants")
    try:
        with tf.init_scope(), graph.as_default():
            tf.convert_to_tensor(value(), dtype=dtype)
    except Exception:  # if the initializer is wrong, running it will raise the error
        return False
    return not graph.captures and not any(op.op_def.is_stateful for op in graph.get_operations())


def _create_variable(next_creator: Any, kwargs: dict[str, Any]) -> Any:
    initial = _read_initial(kwargs)
    if initial is None:
        return next_creator(**kwargs)
    if not isinstance(initial, DeferredInitial):
        return next_creator(**{**kwargs, "initial_value": initial})
    return _create_uninitialized(initial, kwargs)


def _create_uninitialized(initial: DeferredInitial, kwargs: dict[str, Any]) -> Any:
    passed = {name: kwargs[name] for name in _PASSED_ON if kwargs.get(name) is not None}
    variable = resource_variable_ops.UninitializedVariable(
        shape=tf.TensorShape(initial.shape), dtype=tf.as_dtype(initial.dtype), **passed
    )
    defer(variable, initial)
    return variable


def _read_initial(kwargs: dict[str, Any]) -> DeferredInitial | tf.Tensor | None:
    """Returns the initial value of a variable that is to be created, from the arguments of its creation.

    Returns:
      a deferred value; or a small tensor, computed at once; or None: TensorFlow must create the variable as usual.
    """
    known = {*_PASSED_ON, *_PLAIN, "initial_value", "dtype", "shape", "experimental_enable_variable_lifting"}
    known.add("collections")  # applies to graphs only, and creation is eager here
    odd = any(value is not None and name not in known for name, value in kwargs.items())
    if odd or any(kwargs.get(name) not in values for name, values in _PLAIN.items()):
        return None
    value, dtype, shape = kwargs.get("initial_value"), kwargs.get("dtype"), kwargs.get("shape")
    found: DeferredInitial | tf.Tensor | None = None
    if callable(value):
        states = random.getstate(), np.random.get_state()
        try:
            found = record(value, dtype)
        except Exception:  # if the initializer is wrong, running it will raise the error
            found = None
        if found is None:  # it will be run instead, and must draw the same numbers as without the recording
            random.setstate(states[0])
            np.random.set_state(states[1])
    elif isinstance(value, tf.__internal__.EagerTensor) and dtype in (None, value.dtype):
        found = record_uniform_value(value)
    if (
        isinstance(found, DeferredInitial)
        and shape is not None
        and tf.TensorShape(shape) != tf.TensorShape(found.shape)
    ):
        return DeferredInitial(found.shape, found.dtype, found.little, found.ops, found.result).compute_whole()
    return found


def defer(variable: Any, initial: DeferredInitial) -> None:
    """Makes ``variable``, which is uninitialised, a deferred one with the initial value ``initial``."""
    variable._whale_initial = initial
    variable.__class__ = _make_deferred_class()


def forget(variable: Any) -> None:
    """Makes a deferred variable an ordinary one without a value and without its recorded initial value; the caller
    assigns a value next.
    """
    if find_deferred(variable) is not None:
        variable.__class__ = resource_variable_ops.ResourceVariable
        del variable._whale_initial


def restore_from(variable: Any, reader: Reader) -> None:
    """Makes a deferred variable take its value from ``reader``, once it is known which part this rank needs.

    Args:
      reader: called with (begin, size) of a region of the global value, over all dimensions; returns the values there.
    """
    initial = variable._whale_initial
    variable._whale_initial = DeferredInitial(initial.shape, initial.dtype, {}, (), 0, reader)


def make_whole(variable: Any) -> None:
    """Initialises a deferred variable with its whole value; does nothing to other variables."""
    initial = find_deferred(variable)
    if initial is not None:
        with tf.init_scope():
            value = initial.compute_whole()
            forget(variable)
            gen_resource_variable_ops.assign_variable_op(variable._handle, value)


@cache
def _make_deferred_class() -> type:
    kind = resource_variable_ops.ResourceVariable

    def wrap_with_making(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly() or not capturing.get():
                make_whole(self)
                return getattr(self, name)(*args, **kwargs)
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    def wrap_assignment(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                forget(self)
                return getattr(self, name)(*args, **kwargs)
            return wrap_with_making(name)(self, *args, **kwargs)

        return method

    def serialize(self: Any) -> dict[str, Any]:
        return {} if is_restoring_by_regions() else kind._serialize_to_tensors(self)

    members: dict[str, Any] = {
        name: wrap_with_making(name) for name in ("_read_variable_op", "is_initialized", *NEED_WHOLE)
    }
    members.update((name, wrap_assignment(name)) for name in ("assign", "_restore_from_tensors"))
    members["_serialize_to_tensors"] = serialize
    members.update(make_handle_properties(make_whole))
    return type(kind.__name__, (kind,), members)
