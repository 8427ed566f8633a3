"""Traces of steps that a script holds in its hands: what ``get_concrete_function`` of a ``wh.function`` returns.

What saves, converts or shows such a trace gets the function for one device. Called from Python, it is the step: all
ranks compute it together, whatever parts of variables they hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from whale.runtime.context import find_running


class _ConcreteStep(ConcreteFunction):  # type: ignore[misc]
    """A trace of a step."""

    _whale_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or find_running() is None:
            return super().__call__(*args, **kwargs)
        return self._whale_call(args, kwargs)


def route_calls_to_step(
    concrete: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Makes calls of a trace from Python, during runs, calls of the step that it is a trace of.

    Args:
      concrete: TensorFlow's ConcreteFunction.
      step: a ``wh.function``.
      args: that the trace was asked for, with ``kwargs``: values that are no tensors are constants of the trace, and
        need not be given.
    """
    if isinstance(concrete, _ConcreteStep):
        return
    signature = inspect.signature(step.python_function)  # type: ignore[attr-defined]
    constants = {
        name: value
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items()
        if signature.parameters[name].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and not any(isinstance(leaf, tf.Tensor | tf.TypeSpec | tf.Variable) for leaf in tf.nest.flatten(value))
    }

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments = {**constants, **given.arguments}
        return step(*given.args, **given.kwargs)

    concrete.__class__ = _ConcreteStep
    concrete._whale_call = call
