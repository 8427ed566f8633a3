"""Traces an optimizer's update of one variable once for all variables of its kind, instead of once for each.

Keras 3 builds some twenty to forty operations for each variable. In a step of thousands of variables, nearly all of
TensorFlow's tracing time is spent on them. Variables of one shape and dtype get the same operations, on other handles.
So the update is traced once as a function of its gradient, and each further variable is updated by a call of this
function that gets the handles of its own: of the variable where the function captured the variable, of its momentum
where it captured the momentum. The same is done with the decay of weights before the update, and with their moving
average after it. The calls are inlined before planning, as any function's.

Decisions: 0216, 0221.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

_MODULE = "keras.src.backend.tensorflow.optimizer"  # Keras 3's base class of optimizers for TensorFlow
_SCHEDULES = "keras.src.optimizers.schedules.learning_rate_schedule"
# The methods and properties of an optimizer that decide what it does with one variable.
_UPDATE = ("update_step", "assign", "assign_add", "assign_sub", "_get_variable_index")
_DECAY = ("learning_rate", "_get_variable_index")
_AVERAGE = ("iterations", "_get_variable_index")
# What it takes to trace a function beside its operations, and a call of it, in numbers of traced operations.
_FUNCTION_OPERATIONS, _CALL_OPERATIONS = 20, 3
# Tells TensorFlow not to infer the shapes in a function again for this call, for which it copies all constants that it
# knows of the graph so far: there are some for each variable, and a call for each.
_WITHOUT_INFERENCE = "_disable_call_shape_inference"


class _Item(NamedTuple):
    """Represents a variable to which an optimizer does the same as to others of its kind.

    Attributes:
      variable: TensorFlow's variable.
      tensors: what is of this variable alone, such as its gradient.
      key: what tells it from other variables of its shape and dtype, such as whether its weight decays.
    """

    variable: Any
    tensors: tuple[Any, ...] = ()
    key: object = None


@contextmanager
def trace_updates_once() -> Iterator[None]:
    """Makes optimizers of Keras 3 trace one update for all variables of a kind, inside of the context; so with the
    decay of weights, and with their moving averages.
    """
    kind = getattr(sys.modules.get(_MODULE), "TFOptimizer", None)
    if kind is None:
        yield
        return
    update_each, decay_each = kind._distributed_tf_update_step, kind._apply_weight_decay
    average_each = kind._update_model_variables_moving_average

    def update(optimizer: Any, distribution: Any, pairs: Sequence[tuple[Any, Any]], rate: Any) -> None:
        pairs = list(pairs)
        if not _is_known(optimizer, _UPDATE):
            update_each(optimizer, distribution, pairs, rate)
            return
        shared = [rate] if isinstance(rate, tf.Tensor) and not isinstance(rate, ops.EagerTensor) else []

        def update_one(number: int) -> None:
            update_each(optimizer, distribution, [pairs[number]], rate)

        def trace_one(number: int, gradient: tf.Tensor, *rates: tf.Tensor) -> None:
            optimizer.update_step(gradient, pairs[number][1], *(rates or (rate,)))

        items = [_Item(variable, (gradient,)) for gradient, variable in pairs]
        _apply_by_kind(optimizer, items, shared, update_one, trace_one)

    def decay(optimizer: Any, variables: Sequence[Any]) -> None:
        rate = getattr(optimizer, "_learning_rate", None)
        # Python code of the script may return another rate whenever it is called, which is for each variable. A
        # schedule depends on the step alone.
        is_own = callable(rate) and not isinstance(rate, sys.modules[_SCHEDULES].LearningRateSchedule)
        if optimizer.weight_decay is None or is_own or not _is_known(optimizer, _DECAY):
            decay_each(optimizer, variables)
            return
        own = [_find_tensorflow_variable(variable) for variable in variables]
        items = [_Item(variable, key=optimizer._use_weight_decay(variable)) for variable in own]

        def decay_one(number: int) -> None:
            decay_each(optimizer, [own[number]])

        _apply_by_kind(optimizer, items, [], decay_one, decay_one)

    def average(optimizer: Any, variables: Sequence[Any]) -> None:
        if not optimizer.use_ema or not _is_known(optimizer, _AVERAGE):
            average_each(optimizer, variables)
            return
        pairs = [one for one in zip(variables, optimizer._model_variables_moving_average) if one[1] is not None]

        def average_one(number: int) -> None:
            variable, mean = pairs[number]
            average_each(_OfOneVariable(optimizer, mean), [variable])

        items = [_Item(_find_tensorflow_variable(variable)) for variable, _ in pairs]
        _apply_by_kind(optimizer, items, [], average_one, average_one)

    inherited = "_update_model_variables_moving_average" not in vars(kind)
    kind._distributed_tf_update_step, kind._apply_weight_decay = update, decay
    kind._update_model_variables_moving_average = average
    try:
        yield
    finally:
        kind._distributed_tf_update_step, kind._apply_weight_decay = update_each, decay_each
        kind._update_model_variables_moving_average = average_each
        if inherited:
            del kind._update_model_variables_moving_average


class _OfOneVariable:
    """Stands for an optimizer that has the moving average of one variable only."""

    def __init__(self, optimizer: Any, average: Any) -> None:
        self._optimizer, self._model_variables_moving_average = optimizer, [average]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _is_known(optimizer: Any, names: Sequence[str]) -> bool:
    """Returns True if a graph is traced, and what the optimizer does with a variable is Keras' own code, which reads
    nothing of the variable but its shape, its dtype and the state at its index.

    Args:
      names: the methods and properties that do it.
    """
    if tf.executing_eagerly() or any(name in vars(optimizer) for name in names):
        return False
    found = [getattr(type(optimizer), name) for name in names]
    functions = [one.fget if isinstance(one, property) else one for one in found]
    return all(str(one.__module__).startswith("keras.src.") for one in functions)


def _apply_by_kind(
    optimizer: Any,
    items: Sequence[_Item],
    shared: Sequence[tf.Tensor],
    apply: Callable[[int], None],
    trace: Callable[..., None],
) -> None:
    """Does the same to each item, in the order given: to the first of a kind by itself, and to the others by calls of a
    function if that takes less time than to trace each.

    Args:
      shared: tensors of the graph that all items use.
      apply: does it to the item of a number.
      trace: does the same, given the number, the item's tensors and those that all use, in the graph of a function.
    """
    states, graph = _list_states(optimizer), ops.get_default_graph()
    kinds = [_find_kind(optimizer, states, item) for item in items]
    left = Counter(kinds)
    functions: dict[object, _Update | None] = {None: None}
    for number, (kind, item) in enumerate(zip(kinds, items)):
        left[kind] -= 1
        function = functions.get(kind)
        if function is not None:
            function.call(item.variable, [*item.tensors, *shared], optimizer._get_variable_index(item.variable))
            continue
        before = graph.version
        apply(number)
        if kind not in functions:
            each = graph.version - before
            saves = left[kind] * (each - _CALL_OPERATIONS) > each + _FUNCTION_OPERATIONS
            functions[kind] = _trace_update(optimizer, states, item, shared, partial(trace, number)) if saves else None


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


def _find_kind(optimizer: Any, states: Mapping[str, Sequence[Any]], item: _Item) -> object | None:
    """Returns a key that is equal for variables whose updates differ only in their handles; None: they are unlike."""
    variable, tensors = item.variable, item.tensors
    if not isinstance(variable, resource_variable_ops.BaseResourceVariable):
        return None  # variables of tf.distribute have several handles
    if not all(isinstance(tensor, tf.Tensor) for tensor in tensors):
        return None  # gradients of rows have other sizes
    if not all(one.shape.is_fully_defined() for one in (variable, *tensors)):
        return None
    index = optimizer._get_variable_index(variable)
    own = [
        None if (state := states_of_all[index]) is None else (tuple(state.shape), state.dtype)
        for states_of_all in states.values()
    ]
    given = [(tuple(one.shape), one.dtype) for one in (variable, *tensors)]
    return (type(variable), tuple(given), tuple(own), item.key)


@dataclass(slots=True)
class _Update:
    """Holds the update of a variable as a function.

    Attributes:
      function: takes the tensors of the variable alone, such as its gradient, and those that all updates share.
      captures: what it captures, for each either a handle that all updates share, or the list that has the variable
        whose handle is passed: the optimizer's lists of state, or None for the updated variable itself.
      called: the type and the attributes of the operation that calls it; None: it was not called yet.
    """

    function: Any
    captures: tuple[tf.Tensor | Sequence[Any] | None, ...]
    called: tuple[str, dict[str, Any]] | None = None

    def call(self, variable: Any, tensors: Sequence[tf.Tensor], index: int) -> None:
        """Updates ``variable``, which is the optimizer's variable number ``index``."""
        graph, passed = ops.get_default_graph(), list[tf.Tensor]()
        for capture in self.captures:
            if not isinstance(capture, tf.Tensor):
                own = variable if capture is None else _find_tensorflow_variable(capture[index])
                resource_variable_ops.variable_accessed(own)
                capture = own.handle
            passed.append(graph.capture(capture, name="resource"))  # what has no name is named by a number
        if self.called is not None:
            op_type, attributes = self.called
            graph._create_op_internal(op_type, [*tensors, *passed], [], attrs=attributes)
            return
        self.function._call_flat([*tensors], passed)
        made = graph.get_operations()[-1]
        self.called = made.type, {**made.node_def.attr, _WITHOUT_INFERENCE: AttrValue(b=True)}


def _trace_update(
    optimizer: Any,
    states: Mapping[str, Sequence[Any]],
    item: _Item,
    shared: Sequence[tf.Tensor],
    trace: Callable[..., None],
) -> _Update | None:
    """Traces the update of a variable as a function; returns None if it captures what may belong to this variable
    alone.

    Args:
      shared, trace: as of ``_apply_by_kind``; ``trace`` without the number.
    """
    variable, index = item.variable, optimizer._get_variable_index(item.variable)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in (*item.tensors, *shared)]

    def update(*tensors: tf.Tensor) -> None:
        trace(*tensors)

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


def _find_tensorflow_variable(variable: Any) -> Any:
    """Returns the variable of TensorFlow that a variable of Keras has."""
    return getattr(variable, "_value", variable)
