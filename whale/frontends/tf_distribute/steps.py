"""Turns a ``tf.function`` that calls ``strategy.run`` into a ``wh.function`` step of all ranks.

Whether a ``tf.function`` does so is found out at its first call, while TensorFlow traces it: when the trace reaches
``strategy.run``, an exception ends it, and the function becomes a ``wh.function``. If the function itself takes batches
from a distributed dataset, it is run in Python from then on, and the function that it passes to ``strategy.run``
becomes the step.

Decision: 0059.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from whale.capture.sharded import ShardedTensor
from whale.errors import ProgramError
from whale.runtime.context import find_running
from whale.runtime.function import Function, function
from whale.runtime.variables.deferred import capturing

_STEP, _MODE = "_whale_step", "_whale_mode"


class _TraceEnd(BaseException):
    """Raised to end the trace of a tf.function, and caught by the patched ``__call__``. It is no subclass of Exception,
    so that AutoGraph and scripts do not catch it.
    """


class _StepFound(_TraceEnd):
    """Raised if the function being traced calls ``strategy.run``."""


class _BatchesTaken(_TraceEnd):
    """Raised if the function being traced reads batches from a distributed dataset."""


# True while a tf.function called from Python is traced, whose call can still be made in another way.
_open: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_strategy_open", default=False)


def install() -> None:
    """Patches ``tf.function`` objects' ``__call__``, once per process; without a run they behave as before."""
    kind = polymorphic_function.Function
    if hasattr(kind.__call__, "_whale_original"):
        return
    original = kind.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or capturing.get() or find_running() is None:
            return original(self, *args, **kwargs)
        return _call(original, self, args, kwargs)

    __call__._whale_original = original  # type: ignore[attr-defined]
    kind.__call__ = __call__


def _call(original: Callable[..., Any], fn: Any, args: Any, kwargs: Any) -> Any:
    mode = getattr(fn, _MODE, "")
    if not mode and any(isinstance(leaf, ShardedTensor) for leaf in tf.nest.flatten((args, kwargs))):
        mode = _become(fn, "step")
    for way in ("", "step"):
        if mode != way:
            continue
        token = _open.set(True)
        try:
            return original(fn, *args, **kwargs) if way == "" else getattr(fn, _STEP)(*args, **kwargs)
        except _StepFound:
            mode = _become(fn, "step")
        except _BatchesTaken:
            mode = _become(fn, "python")
        finally:
            _open.reset(token)
    try:
        return fn.python_function(*args, **kwargs)
    except StopIteration:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None


def _become(fn: Any, mode: str) -> str:
    setattr(fn, _MODE, mode)
    if mode == "step":
        setattr(fn, _STEP, function(fn))
    return mode


def is_inside_step() -> bool:
    """Returns True if ``strategy.run`` is called while a step is traced, and False if it is called eagerly.

    If a tf.function that is not a step yet is being traced, raises a signal that ends the trace, so that it becomes a
    step.
    """
    if capturing.get():
        return True
    if tf.executing_eagerly():
        return False
    _end(_StepFound, "strategy.run()", "decorate the outer function with wh.function, and call it")


def refuse_taking(what: str) -> None:
    """Ends the trace of a function that takes a batch from a distributed dataset; does nothing in eager code.

    A trace would take the batch only once. Afterwards the function is run in Python.

    Args:
      what: the call that takes the batch, for the error.

    Raises:
      ProgramError: a graph is being built that is not a tf.function called from Python.
    """
    if not tf.executing_eagerly():
        _end(_BatchesTaken, what, "loop over the batches in Python, and pass each to the step")


def _end(signal: type[_TraceEnd], what: str, action: str) -> NoReturn:
    if _open.get():
        raise signal
    raise ProgramError(
        f"{what} is called in a graph that Whale cannot distribute",
        given=f"{what} in a graph that is not a tf.function called from Python",
        expected="a tf.function that is called from Python, or a step of wh.function",
        action=action,
    )


class CompiledSteps:
    """Caches the ``wh.function`` steps made of functions that ``strategy.run`` was given in eager code."""

    def __init__(self) -> None:
        self._found: dict[Any, Function] = {}

    def find_step(self, fn: Callable[..., Any]) -> Any:
        """Returns the step of a function.

        A nested function that the script defines anew for each call keeps its step if its code and closure are equal.

        Raises:
          ProgramError: the function captures a tensor of the enclosing function. The first value would be used in all
            calls.
        """
        cells = getattr(fn, "__closure__", None) or ()
        held = tuple(cell.cell_contents for cell in cells if _is_filled(cell))
        tensor = next((value for value in held if isinstance(value, tf.Tensor | ShardedTensor)), None)
        if tensor is not None and "<locals>" in getattr(fn, "__qualname__", ""):
            raise ProgramError(
                "a function passed to strategy.run captures a tensor of the enclosing function",
                op=getattr(fn, "__name__", "step"),
                given=f"a captured tensor of shape {tensor.shape}",
                expected="tensors as arguments: strategy.run(step, args=(tensor,))",
                action="pass the tensor in args",
            )
        code = getattr(fn, "__code__", None)
        key = id(fn) if code is None else (code, tuple(map(id, held)), repr(getattr(fn, "__defaults__", None)))
        if key not in self._found:
            self._found[key] = function(fn)  # holds fn: no other object gets the numbers in its key
        return self._found[key]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
