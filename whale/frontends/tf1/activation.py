"""Tells patched methods of TensorFlow 1 whether to act as Whale's or as TensorFlow's own at present."""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from whale.runtime.context import Context, find_running

# Overrides whether sessions are Whale's: True in force_sessions, False in leave_alone, None: the run decides.
_asked: contextvars.ContextVar[bool | None] = contextvars.ContextVar("asked", default=None)


def find_spread_run() -> Context | None:
    """Returns the run over which sessions are distributed; None: TensorFlow's own behaviour applies.

    Also returns None for a run of one rank, unless a configuration key is set, or the run is a dry run or is measured.
    """
    context = find_running()
    if context is None or _asked.get() is not None:
        return context if _asked.get() else None
    if context.solo or context.planning.own_programs is not None:
        return None
    if context.planned_size > 1 or context.planning.dry is not None or context.planning.meter is not None:
        return context
    config = context.config
    said = (key for key in config if key != "mesh.plan_cache")  # a cache does not change how a program is run
    return context if any(config.origin(key) != "default" for key in said) else None


def find_following_run() -> Context | None:
    """Returns the run if sessions are distributed and this rank is not rank 0; None if this rank writes files."""
    context = find_spread_run()
    return context if context is not None and context.has_other_processes and context.rank > 0 else None


@contextmanager
def leave_alone() -> Iterator[None]:
    """Makes sessions that are created inside of the context TensorFlow's own, and lets this rank write files there, as
    without a run.
    """
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def force_sessions() -> Iterator[None]:
    """Makes sessions that are created inside of the context Whale's, also in a run of one rank."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def replace_method(kind: Any, name: str, new: Callable[..., Any]) -> None:
    """Replaces attribute ``name`` of a class or module: a call runs ``new(original, ...)`` from then on."""
    original = getattr(kind, name)
    setattr(kind, name, functools.wraps(original)(functools.partial(new, original)))
    if isinstance(kind, type):  # a partial is no method
        answering = getattr(kind, name)

        @functools.wraps(original)
        def call_replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return answering(self, *args, **kwargs)

        setattr(kind, name, call_replacement)


def replace_function(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces a function by ``new(original, ...)`` in all loaded modules that refer to it, scripts included."""

    @functools.wraps(original)
    def call_replacement(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [key for key, value in list(names.items()) if value is original]:
            setattr(module, name, call_replacement)
