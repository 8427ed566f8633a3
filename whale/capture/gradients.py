"""Gives gradient nodes the scope (``wh.stage``, ``wh.split``) of the forward op that they differentiate.

TensorFlow computes the gradient of one op through one Python function: ``backprop._gradient_function`` for tapes,
``gradients_util._MaybeCompile`` for tf.gradients. For ``tf.custom_gradient`` and for calls of functions,
``record.record_operation`` hands a backward function to the tape. ``scope_gradients`` wraps all three, so that they run
under the scope attribute of the forward op.

``order_custom_gradients`` puts the variables of a ``tf.custom_gradient`` into one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop, record
from tensorflow.python.ops import custom_gradient, gradients_util

try:
    from tensorflow.python import pywrap_tfe
except ImportError:
    from tensorflow.python.eager import pywrap_tfe

from whale.capture.attrs import BACKWARD, SCOPE_ATTR, mark_attributes


@contextmanager
def scope_gradients(marked: bool = False) -> Iterator[None]:
    """Gives gradient nodes that are built inside of the context the scope of their forward op.

    Patches functions of TensorFlow and restores them at the end. Such contexts may be nested.

    Args:
      marked: whether gradient nodes also carry the mark "backward".
    """
    tape_function = backprop._gradient_function
    graph_function = gradients_util._MaybeCompile
    recorded = record.record_operation

    def scope_tape_gradient(op_name: str, attrs: Any, count: int, inputs: Any, outputs: Any, *rest: Any) -> Any:
        with _enter_scope(_find_call_scope(op_name, inputs, outputs), marked):
            return tape_function(op_name, attrs, count, inputs, outputs, *rest)

    def scope_graph_gradient(scope: str, op: tf.Operation, func: Any, gradient: Callable[[], Any]) -> Any:
        with _enter_scope(_find_scope_attr(op), marked):
            return graph_function(scope, op, func, gradient)

    def record_with_scope(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Callable[..., Any],
        forward_function: Any = None,
    ) -> Any:
        known = [t.op for t in output_tensors if _is_graph_tensor(t)]

        def run_scoped(*slopes: Any) -> Any:
            with _enter_scope(_find_scope_attr(known[0]), marked):
                return backward_function(*slopes)

        gradient = run_scoped if known else backward_function
        return recorded(op_type, output_tensors, input_tensors, gradient, forward_function)

    _install(scope_tape_gradient, scope_graph_gradient, record_with_scope)
    try:
        yield
    finally:
        _install(tape_function, graph_function, recorded)


@contextmanager
def order_custom_gradients() -> Iterator[None]:
    """Makes ``tf.custom_gradient`` take variables in the order in which they were created, inside of the context.

    TensorFlow collects the variables that a function uses in a set, whose order follows from their addresses in memory,
    and sorts them by name. Variables that a script gives no name have one in common, so that processes would trace
    different graphs.
    """
    namespace = vars(custom_gradient)
    before = namespace.get("sorted", sorted)

    def sort_variables(variables: Iterable[Any], key: Callable[[Any], Any]) -> list[Any]:
        return sorted(sorted(variables, key=_find_creation), key=key)

    namespace["sorted"] = sort_variables
    try:
        yield
    finally:
        namespace["sorted"] = before


def _find_creation(variable: Any) -> int:
    """Returns a number that is larger the later TensorFlow has created a variable in its process."""
    number = variable._unique_id.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


def _install(of_tape: Callable[..., Any], of_graph: Callable[..., Any], of_record: Callable[..., Any]) -> None:
    backprop._gradient_function = of_tape
    pywrap_tfe.TFE_Py_RegisterGradientFunction(of_tape)
    gradients_util._MaybeCompile = of_graph
    record.record_operation = of_record


def _enter_scope(scope: Any, marked: bool) -> Any:
    attributes = {} if scope is None else {SCOPE_ATTR: scope}
    if marked:
        attributes |= mark_attributes(BACKWARD)
    return tf.compat.v1.get_default_graph()._attr_scope(attributes) if attributes else nullcontext()


def _find_scope_attr(op: tf.Operation) -> Any:
    """Returns the scope attribute (an AttrValue) of ``op``, or None."""
    node_def = op.node_def
    return node_def.attr[SCOPE_ATTR] if SCOPE_ATTR in node_def.attr else None


def find_scope(op: tf.Operation) -> str:
    """Returns the path of the scope in which ``op`` was built; "" if it was built in none."""
    found = _find_scope_attr(op)
    return "" if found is None else str(found.s.decode())


def _find_call_scope(op_name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns the scope attribute of the forward op that a tape differentiates; None if the op is not found.

    The tape does not pass the op itself, so it is looked up by its type among the producers and consumers of its
    tensors.

    Args:
      op_name: type of the op.
      inputs, outputs: its tensors; None in place of those that the gradient does not need.
    """
    for output in outputs or ():
        if _is_graph_tensor(output) and output.op.type == op_name:
            return _find_scope_attr(output.op)
    known = [t for t in inputs or () if _is_graph_tensor(t)]
    if known:
        wanted = {id(t) for t in known}
        for consumer in known[0].consumers():
            if consumer.type == op_name and wanted <= {id(t) for t in consumer.inputs}:
                return _find_scope_attr(consumer)
    return None


def _is_graph_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and not isinstance(value, tf.__internal__.EagerTensor)
