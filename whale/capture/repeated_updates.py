"""Traces an optimizer's update of one variable once for all variables of its kind, instead of once for each.

Keras 3 builds some twenty to forty operations for each variable. In a step of thousands of variables, nearly all of
TensorFlow's tracing time is spent on them. Variables of one shape and dtype get the same operations, on other handles.
So the update is traced once as a function of its gradient, and each further variable is updated by a call of this
function that gets the handles of its own: of the variable where the function captured the variable, of its momentum
where it captured the momentum. The calls are inlined before planning, as any function's.

Decision: 0216.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

_MODULE = "keras.src.backend.tensorflow.optimizer"  # Keras 3's base class of optimizers for TensorFlow
_METHODS = ("update_step", "assign", "assign_add", "assign_sub", "_get_variable_index")
# What it takes to trace a function beside its operations, and a call of it, in numbers of traced operations.
_FUNCTION_OPERATIONS, _CALL_OPERATIONS = 20, 3


@contextmanager
def trace_updates_once() -> Iterator[None]:
    """Makes optimizers of Keras 3 trace one update for all variables of a kind, inside of the context."""
    kind = getattr(sys.modules.get(_MODULE), "TFOptimizer", None)
    if kind is None:
        yield
        return
    update_each = kind._distributed_tf_update_step

    def update(optimizer: Any, distribution: Any, pairs: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        def one_by_one(some: Sequence[tuple[Any, Any]]) -> None:
            update_each(optimizer, distribution, some, learning_rate)

        pairs = list(pairs)
        if _is_known(optimizer) and not tf.executing_eagerly():
            _update_by_kind(optimizer, pairs, learning_rate, one_by_one)
        else:
            one_by_one(pairs)

    kind._distributed_tf_update_step = update
    try:
        yield
    finally:
        kind._distributed_tf_update_step = update_each


def _is_known(optimizer: Any) -> bool:
    """Returns True if what the optimizer does with a variable is Keras' own code, which reads nothing of the variable
    but its shape, its dtype and the state at its index.
    """
    if any(name in vars(optimizer) for name in _METHODS):
        return False
    return all(str(getattr(type(optimizer), name).__module__).startswith("keras.src.") for name in _METHODS)


def _update_by_kind(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], rate: Any, one_by_one: Callable[[Sequence[tuple[Any, Any]]], None]
) -> None:
    """Updates each variable, in the order given: the first of a kind by itself, and the others by calls of a function
    if that takes less time than to trace each.
    """
    states, graph = _list_states(optimizer), ops.get_default_graph()
    kinds = [_find_kind(optimizer, states, gradient, variable) for gradient, variable in pairs]
    left = Counter(kinds)
    functions: dict[object, _Update | None] = {None: None}
    for kind, (gradient, variable) in zip(kinds, pairs):
        left[kind] -= 1
        function = functions.get(kind)
        if function is not None:
            function.call(gradient, variable, rate, optimizer._get_variable_index(variable))
            continue
        before = graph.version
        one_by_one([(gradient, variable)])
        if kind not in functions:
            each = graph.version - before
            saves = left[kind] * (each - _CALL_OPERATIONS) > each + _FUNCTION_OPERATIONS
            functions[kind] = _trace_update(optimizer, states, gradient, variable, rate) if saves else None


def _list_states(optimizer: Any) -> dict[str, Sequence[Any]]:
    """Returns the optimizer's lists that have an element for each of its variables: a variable of state, or None."""
    count = len(optimizer._trainable_variables)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and len(value) == count
        and name not in ("_variables", "_trainable_variables")
        and all(one is None or hasattr(one, "assign") for one in value)
    }


def _find_kind(optimizer: Any, states: Mapping[str, Sequence[Any]], gradient: Any, variable: Any) -> object | None:
    """Returns a key that is equal for variables whose updates differ only in their handles; None: they are unlike."""
    if not isinstance(gradient, tf.Tensor) or not isinstance(variable, resource_variable_ops.BaseResourceVariable):
        return None  # gradients of rows have other sizes, and variables of tf.distribute have several handles
    if not gradient.shape.is_fully_defined() or not variable.shape.is_fully_defined():
        return None
    index = optimizer._get_variable_index(variable)
    own = [
        None if (state := states_of_all[index]) is None else (tuple(state.shape), state.dtype)
        for states_of_all in states.values()
    ]
    return (tuple(variable.shape), variable.dtype, tuple(gradient.shape), gradient.dtype, tuple(own))


@dataclass(frozen=True, slots=True)
class _Update:
    """Holds the update of a variable as a function.

    Attributes:
      function: takes the gradient, and the learning rate if that is a tensor of the graph.
      captures: what it captures, for each either a handle that all updates share, or the list that has the variable
        whose handle is passed: the optimizer's lists of state, or None for the updated variable itself.
    """

    function: Any
    captures: tuple[tf.Tensor | Sequence[Any] | None, ...]

    def call(self, gradient: tf.Tensor, variable: Any, rate: Any, index: int) -> None:
        """Updates ``variable``, which is the optimizer's variable number ``index``."""
        graph, passed = ops.get_default_graph(), []
        for capture in self.captures:
            if not isinstance(capture, tf.Tensor):
                own = variable if capture is None else _find_tensorflow_variable(capture[index])
                resource_variable_ops.variable_accessed(own)
                capture = own.handle
            passed.append(graph.capture(capture, name="resource"))  # what has no name is named by a number
        self.function._call_flat([gradient, *_list_tensors(rate)], passed)


def _trace_update(
    optimizer: Any, states: Mapping[str, Sequence[Any]], gradient: tf.Tensor, variable: Any, rate: Any
) -> _Update | None:
    """Traces the update of ``variable`` as a function; returns None if it captures what may belong to this variable
    alone.
    """
    index = optimizer._get_variable_index(variable)

    def update(gradient: tf.Tensor, *rates: tf.Tensor) -> None:
        optimizer.update_step(gradient, variable, *(rates or (rate,)))

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in (gradient, *_list_tensors(rate))]
    function = tf.function(update, autograph=False).get_concrete_function(*specs)
    handles: dict[int, Sequence[Any] | None] = {id(variable.handle): None}
    others: set[int] = set()
    for values in states.values():
        for number, state in enumerate(values):
            if state is None:
                continue
            handle = _find_tensorflow_variable(state).handle
            if number == index:
                handles.setdefault(id(handle), values)
            else:
                others.add(id(handle))
    captures: list[tf.Tensor | Sequence[Any] | None] = []
    for capture in function.captured_inputs:
        if id(capture) in handles:
            captures.append(handles[id(capture)])
        elif id(capture) in others or capture.dtype != tf.resource or not isinstance(capture, ops.EagerTensor):
            return None
        else:
            captures.append(capture)
    return _Update(function, tuple(captures))


def _list_tensors(rate: Any) -> list[tf.Tensor]:
    """Returns the learning rate if it is a tensor of the graph, which updates get as an argument."""
    return [rate] if isinstance(rate, tf.Tensor) and not isinstance(rate, ops.EagerTensor) else []


def _find_tensorflow_variable(variable: Any) -> Any:
    """Returns the variable of TensorFlow that a variable of Keras has."""
    return getattr(variable, "_value", variable)
