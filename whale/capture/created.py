"""Computes the initial values of variables that a step creates in its first trace.

If an initial value depends on constants and random ops only, tf.function computes it before the first call. If it
depends on an argument or on another variable (Lookahead's slow weights are copies of the weights), tf.function assigns
it in the first call. This module does the same, but without the conditional "is the variable initialized?" that
tf.function puts into its graph for every call. So the first call's program has no such branches and is planned as any
other.

A variable may have a value before that: of a checkpoint that was restored before the first call, which TensorFlow
assigns as soon as the step has made the variable reachable, or of an assignment in ``tf.init_scope``. It keeps that
value, as in tf.function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import lift_to_graph
from tensorflow.python.eager.polymorphic_function.polymorphic_function import UnliftedInitializerVariable
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops
from tensorflow.python.trackable import base as trackable

from whale.errors import CaptureError

_PASSED_ON = ("trainable", "caching_device", "name", "constraint", "synchronization", "aggregation")


class CreatedVariables:
    """Creates and initialises the variables that the traces of one function create.

    Args:
      creator: a variable creator, as ``tf.variable_creator_scope`` takes one, that is called for each variable before
        this class creates it; None: there is none.

    Attributes:
      latest: the variables that the latest run of the function's Python code created.
      assigned: the variables whose initial value the trace assigns, so that only a call of this trace initialises them.
    """

    def __init__(self, creator: Callable[..., Any] | None) -> None:
        self._creator = creator
        self._graph: Any = None
        self._runs = 0
        self._waiting: list[tuple[Any, tf.Tensor, list[tf.Tensor]]] = []
        self._inside: list[Any] = []
        self.latest: list[Any] = []
        self.assigned: list[Any] = []

    def begin(self) -> None:
        """Records that the function's Python code begins to run, and that the current default graph is its trace."""
        self._graph = tf.compat.v1.get_default_graph()
        self._runs += 1
        self.latest = []

    def create(self, next_creator: Callable[..., Any], **wanted: Any) -> Any:
        """Creates a variable; installed as a variable creator for the time of the trace.

        Raises:
          ValueError: the function creates variables again in a later run of its Python code; the text is tf.function's.
        """
        if self._runs > 1:
            raise ValueError(
                "tf.function only supports singleton tf.Variables created on the first call. Make sure the tf.Variable "
                "is only created once or created outside tf.function."
            )
        if tf.executing_eagerly():  # in an init_scope: outside of the function, where the first value is known at once
            self.latest.append(self._ask(_create_eagerly, wanted))
            return self.latest[-1]
        # In nested functions, loops and branches TensorFlow itself creates the variables.
        inside = tf.compat.v1.get_default_graph() is not self._graph
        lifts = wanted.get("experimental_enable_variable_lifting") is not False
        variable = self._ask(next_creator if inside or not lifts else self._make, wanted)
        self.latest.append(variable)
        if inside:
            self._inside.append(variable)
        return variable

    def keep_restored(self, name: str) -> None:
        """Forgets the assignments of the trace to variables that have a value already; the trace with them must not
        run.

        Args:
          name: the step's name, for the error.

        Raises:
          CaptureError: other variables get their initial value by the trace only, so that it would have to run.
        """
        restored = [variable for variable in self.assigned if _has_value(variable)]
        if len(restored) == len(self.assigned):
            self.assigned = []
        elif restored:
            missing = next(variable for variable in self.assigned if not _has_value(variable))
            raise CaptureError(
                "a step creates variables whose first values depend on the call, and only some of them were restored",
                op=name,
                given=f"{restored[0].name}, which has a value, and {missing.name}, which has none",
                expected="all of them, or none, in the checkpoint that was restored before the first call",
                action="create these variables before the checkpoint is restored, or restore it after the first call",
            )

    def initialise(self) -> None:
        """Assigns the initial values that depend on neither arguments nor variables, outside of the trace, to the
        variables that have no value yet.
        """
        waiting, self._waiting = [one for one in self._waiting if not _has_value(one[0])], []
        if not waiting:
            return
        values = [value for _, value, _ in waiting]
        sources = {id(t): t for _, _, captured in waiting for t in captured}

        def first_values() -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            found = lift_to_graph.lift_to_graph(values, graph, list(sources.values()), handle_captures=True)
            return [found[value] for value in values]

        with tf.init_scope():
            # A call of the tf.function itself would be eager where the script has set run_functions_eagerly.
            traced = tf.function(first_values, autograph=False).get_concrete_function()
            for (variable, _, _), value in zip(waiting, traced()):
                gen_resource_variable_ops.assign_variable_op(variable.handle, value)

    def refuse_without_value(self, name: str) -> None:
        """Raises an error if the first call of the traced step would leave a created variable without a value.

        Args:
          name: the step's name, for the error.

        Raises:
          CaptureError: a variable created in a nested function, loop or branch is still uninitialised; or an initial
            value depends on the call, and TensorFlow traced the function again and dropped the trace with the
            assignment.
        """
        for variable in self._inside:
            if isinstance(variable, UnliftedInitializerVariable):
                if not _has_value(variable):
                    raise make_creation_error(name, f"{variable.name}, created inside of a function, loop or branch")
        if self.assigned and self._runs > 1:
            raise make_creation_error(name, f"{self.assigned[0].name}, whose first value depends on the call")

    def _ask(self, next_creator: Callable[..., Any], wanted: dict[str, Any]) -> Any:
        return next_creator(**wanted) if self._creator is None else self._creator(next_creator, **wanted)

    def _make(self, **wanted: Any) -> Any:
        given, name = wanted.get("initial_value"), wanted.get("name")
        if given is None:
            raise ValueError("`initial_value` must be a Tensor or a Python object convertible to a Tensor. Got None.")
        with tf.name_scope(name or "Variable"), tf.name_scope("Initializer"):
            given = given() if callable(given) else given
            restored = given if isinstance(given, trackable.CheckpointInitialValue) else None
            value = tf.convert_to_tensor(given if restored is None else restored.wrapped_value, wanted.get("dtype"))
            value = self._graph.capture(value)  # where it was computed outside of the function
        shape = value.shape if wanted.get("shape") is None else wanted["shape"]
        captured = _find_captured_tensors(value)
        if captured is None:
            if not value.shape.is_fully_defined():
                raise make_creation_error(name or "Variable", f"a first value of shape {value.shape}")
            dims, dtype = value.shape, value.dtype
            variable = self._ask(
                self._make, {**wanted, "initial_value": lambda: tf.zeros(dims, dtype), "dtype": dtype, "shape": shape}
            )
            gen_resource_variable_ops.assign_variable_op(variable.handle, value)
            self.assigned.append(variable)
            return variable
        variable = resource_variable_ops.UninitializedVariable(
            shape=shape, dtype=value.dtype, extra_handle_data=value,
            **{one: wanted[one] for one in _PASSED_ON if wanted.get(one) is not None},
        )  # fmt: skip
        if restored is not None:
            variable._maybe_initialize_trackable()
            variable._update_uid = restored.checkpoint_position.restore_uid
        self._waiting.append((variable, value, captured))
        return variable


def _has_value(variable: Any) -> bool:
    with tf.init_scope():
        return bool(gen_resource_variable_ops.var_is_initialized_op(variable.handle))


def _create_eagerly(**wanted: Any) -> Any:
    return resource_variable_ops.default_variable_creator_v2(None, **wanted)


def make_creation_error(name: str, given: str) -> CaptureError:
    """Returns the error for a variable whose initial value Whale cannot compute.

    Args:
      name: name of the step or of the variable.
      given: which variable it is, or what is wrong with its initial value.
    """
    return CaptureError(
        "Whale cannot compute the initial value of a variable that the step creates",
        op=name,
        given=given,
        expected="a variable of fully known shape; if it is created in a nested function, loop or branch, an initial "
        "value made of constants or random numbers",
        action="create the variable before the first call of the step, or at the top level of the step",
    )


def _find_captured_tensors(value: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns the captured constants that ``value`` depends on, or None.

    None means that ``value`` also depends on a variable, on another resource or on an argument of the function, so that
    it cannot be computed before the call.
    """
    constants = {
        id(internal): internal
        for external, internal in value.graph.captures
        if isinstance(external, tf.__internal__.EagerTensor) and external.dtype not in (tf.resource, tf.variant)
    }
    found: list[tf.Tensor] = []
    seen, waiting = {value.op}, [value.op]
    while waiting:
        op = waiting.pop()
        if op.type == "Placeholder":
            if id(op.outputs[0]) not in constants:
                return None
            found.append(op.outputs[0])
        new = {*(t.op for t in op.inputs), *op.control_inputs} - seen
        seen |= new
        waiting += new
    return found
