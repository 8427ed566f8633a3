"""Computes gradients for a tf.GradientTape that is outside of a step of ``wh.function``.

The tape cannot see into a step, whose operations run on all ranks. When it asks for gradients, a second step computes
the first one's results again, as recomputation does, and differentiates them: ``tape.gradient`` inside of a step,
multiplied by the upstream gradients. A step that draws random numbers or changes variables would not compute the same
results again, so its gradients are refused.

Decision: 0182.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.eager import forwardprop_util, record, tape
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_resource_variable_ops, gradients_util

from whale.capture.captured import Traced
from whale.errors import ProgramError
from whale.ir.ops import CALLS, HAS_BODIES, READS

# Ops that TensorFlow declares stateful, but that compute the same results when they run again.
_GIVE_THE_SAME = (
    HAS_BODIES
    | CALLS
    | READS
    | frozenset(
        "Assert CheckNumericsV2 MutableHashTableV2 Placeholder PrintV2 TensorListReserve VarHandleOp XlaLaunch".split()
    )
)


def may_be_recorded() -> bool:
    """Returns True if a gradient tape around a call may record it, or a stopped tape asks which variables the call
    uses.

    ``tf.recompute_grad`` stops the tapes, and goes back through a second call to the variables that the first one used.
    """
    return record.could_possibly_record() or pywrap_tfe.TFE_Py_TapeSetIsStopped()  # type: ignore[no-any-return]


class TapedCalls:
    """Records calls of one step on gradient tapes, and holds the compiled gradient steps.

    Args:
      name: of the step.
      called: computes the step's results while another step is traced.
      make_step: makes a step (``wh.function``) of a Python function.
    """

    def __init__(
        self, name: str, called: Callable[..., Any], make_step: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._name, self._called, self._make_step = name, called, make_step
        self._steps: dict[Hashable, Callable[..., Any]] = {}
        self._states: dict[int, str] = {}  # by the number of the trace

    def record_call(self, traced: Traced, args: Any, kwargs: Any, result: Any, why: str = "") -> None:
        """Records a call of the step on the gradient tapes around it; does nothing if no tape watches an argument or
        variable.

        Args:
          traced: the trace of the step that was called.
          args: positional arguments of the call.
          kwargs: keyword arguments of the call.
          result: what the call returned.
          why: the reason why the call cannot be repeated, in words; "": the caller knows of none.

        Raises:
          ProgramError: a ForwardAccumulator is around the call.
        """
        variables = [one.variable for one in traced.variables if _is_differentiable(one.variable)]
        for variable in variables:
            tape.variable_accessed(variable)
        variables = [variable for variable in variables if _is_watched(variable.handle)]
        leaves = _flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf) and _is_watched(leaf)]
        results = [leaf for leaf in _flatten(result) if _is_tensor(leaf)]
        if not results or (not variables and not places):
            return
        given = [leaves[i] for i in places]
        inputs = [*(variable.handle for variable in variables), *given]
        if forwardprop_util.pack_tangents(inputs).tangents:
            raise self._make_error("a ForwardAccumulator around the call, which would get no tangents")
        why = why or self._describe_state(traced.function)
        held = [] if why else [_read_own(variable) for variable in variables]

        def go_back(*upstream: Any) -> Any:
            reason = why
            if not reason and not tf.executing_eagerly():
                reason = "the gradients are asked for while a graph is built"
            if not reason and not all(map(_is_unchanged, held, map(_read_own, variables))):
                reason = "variables that the step reads have changed since the call"
            if reason:
                raise self._make_error(f"a GradientTape around the call asks for gradients of its results; {reason}")
            key = (*map(id, variables), None, *places)
            if key not in self._steps:
                self._steps[key] = self._make_step(_make_gradient(self._called, variables, places))
            return self._steps[key](list(upstream), args, kwargs)

        record.record_operation(self._name, results, inputs, go_back)

    def _make_error(self, given: str) -> ProgramError:
        return ProgramError(
            "a gradient tape outside of a step of wh.function cannot differentiate through the step",
            op=self._name,
            given=given,
            expected="the tape inside the step; or a step that, computed once more for its gradient, computes the same",
            action="compute the gradient inside the function that wh.function decorates",
        )

    def _describe_state(self, function: Any) -> str:
        """Returns the reason why the traced function would not compute the same again; "" if it would. Cached for each
        trace.
        """
        if id(function) not in self._states:
            self._states[id(function)] = _describe_state(function)
        return self._states[id(function)]


def _make_gradient(
    called: Callable[..., Any], variables: Sequence[tf.Variable], places: Sequence[int]
) -> Callable[..., Any]:
    def differentiate(upstream: list[tf.Tensor], args: Any, kwargs: Any) -> Any:
        with tf.GradientTape() as inner:
            leaves = _flatten((args, kwargs))
            given = [leaves[i] for i in places]
            inner.watch(given)
            results = [leaf for leaf in _flatten(called(*args, **kwargs)) if _is_tensor(leaf)]
        return inner.gradient(results, [*variables, *given], upstream)

    found: Callable[..., Any] = autograph_artifact(differentiate)
    return found


_flatten = partial(tf.nest.flatten, expand_composites=True)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and _is_differentiable(leaf)


def _is_watched(tensor: tf.Tensor) -> bool:
    return gradients_util.PossibleTapeGradientTypes([tensor]) != 0


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _describe_state(function: Any) -> str:
    graph = function.graph.as_graph_def()
    for node in [*graph.node, *(node for one in graph.library.function for node in one.node_def)]:
        definition = op_def_registry.get(node.op)
        if definition is not None and definition.is_stateful and node.op not in _GIVE_THE_SAME:
            return f"the step draws random numbers, changes variables or has other effects ({node.op})"
    return ""


def _read_own(variable: Any) -> list[tf.Tensor]:
    """Returns the tensors of a variable's value that this process holds, without a copy: its shards if it is sharded,
    else the value itself.
    """
    parts = getattr(variable, "_whale_parts", None)
    if parts is not None:
        return list(parts.read_own())
    return [gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)]


def _is_unchanged(held: Sequence[tf.Tensor], now: Sequence[tf.Tensor]) -> bool:
    """Returns True if two lists of values are equal bit for bit. Values at the same address are equal, because nobody
    writes to a buffer that is referenced.
    """
    pairs = [tuple(np.asarray(value._numpy()) for value in pair) for pair in zip(held, now, strict=True)]
    return all(
        one.shape == other.shape and (one.ctypes.data == other.ctypes.data or one.tobytes() == other.tobytes())
        for one, other in pairs
    )
