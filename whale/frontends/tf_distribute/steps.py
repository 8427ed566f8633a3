"""Converts a ``tf.function`` whose body calls ``strategy.run`` to a step of all ranks.

This is detected at the function's first call: while it is traced, ``strategy.run`` ends the trace, and the function
becomes a ``wh.function``. A function that itself takes batches from a distributed dataset runs in Python from then on,
and the function passed to ``strategy.run`` is the step.

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
    """A signal that ends a trace; AutoGraph and scripts catch only subclasses of Exception, which it is not."""


class _StepFound(_TraceEnd):
    """The signal that the function calls ``strategy.run``."""


class _BatchesTaken(_TraceEnd):
    """The signal that the function takes batches from a distributed dataset."""


# Whether the graph that is built is of a tf.function whose call can still be carried out in another way.
_open: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_strategy_open", default=False)


def install() -> None:
    """Patches the call of tf.functions, present and later ones. They run as TensorFlow's own while no run goes on."""
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
    """Tells whether the present call is part of a step already, or else has to become one.

    Ends the trace if a tf.function has to become a step first.
    """
    if capturing.get():
        return True
    if tf.executing_eagerly():
        return False
    _end(_StepFound, "strategy.run()", "decorate the outer function with wh.function, and call it")


def refuse_taking(what: str) -> None:
    """Raises an error for taking a batch from ``what`` in a graph, which would take it only once, in tracing."""
    if not tf.executing_eagerly():
        _end(_BatchesTaken, what, "loop over the batches in Python, and pass each to the step")


def _end(signal: type[_TraceEnd], what: str, action: str) -> NoReturn:
    if _open.get():
        raise signal
    raise ProgramError(
        f"{what} in a graph that Whale does not see",
        given=f"{what} while TensorFlow builds a graph",
        expected="the call of a tf.function from Python, or a step of wh.function",
        action=action,
    )


class CompiledSteps:
    """Caches the steps that ``strategy.run`` was given in Python, each compiled once."""

    def __init__(self) -> None:
        self._found: dict[Any, Function] = {}

    def find_step(self, fn: Callable[..., Any]) -> Any:
        """Returns a function's step; a nested function, defined again for each call, keeps its step if its code and
        closure are equal.

        Raises:
          ProgramError: it captures a tensor of the enclosing function, whose first value would be used for ever.
        """
        cells = getattr(fn, "__closure__", None) or ()
        held = tuple(cell.cell_contents for cell in cells if _is_filled(cell))
        tensor = next((value for value in held if isinstance(value, tf.Tensor | ShardedTensor)), None)
        if tensor is not None and "<locals>" in getattr(fn, "__qualname__", ""):
            raise ProgramError(
                "a step captures a tensor of the enclosing function",
                op=getattr(fn, "__name__", "step"),
                given=f"a tensor of shape {tensor.shape} that the nested function reads",
                expected="tensors as arguments: strategy.run(step, args=(tensor,))",
                action="pass it in args",
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
