"""Decides whether TensorFlow 1 objects of a script are Whale's at the moment, for patched methods."""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from whale.runtime.context import Context, find_running

# Whether sessions are taken, where that is not the run's to say; False is for what one rank does for all of them.
_asked: contextvars.ContextVar[bool | None] = contextvars.ContextVar("asked", default=None)


def find_spread_run() -> Context | None:
    """Returns the run over which sessions are distributed; None: TensorFlow's own behaviour applies.

    This is also None for a run of one rank, unless it is configured or measured.
    """
    context = find_running()
    if context is None or _asked.get() is not None:
        return context if _asked.get() else None
    if context.solo or context.planning.own_programs is not None:
        return None
    if context.planned_size > 1 or context.planning.dry is not None or context.planning.meter is not None:
        return context
    config = context.config
    said = (key for key in config if key != "mesh.plan_cache")  # which says nothing of how a program is to be run
    return context if any(config.origin(key) != "default" for key in said) else None


def find_following_run() -> Context | None:
    """Returns the run if this rank is not the one that writes files; None: it writes."""
    context = find_spread_run()
    return context if context is not None and context.has_other_processes and context.rank > 0 else None


@contextmanager
def leave_alone() -> Iterator[None]:
    """Makes this rank independent inside the context: sessions are TensorFlow's own, and files are written."""
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def force_sessions() -> Iterator[None]:
    """Makes sessions created inside Whale's, in any run."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def replace_method(kind: Any, name: str, new: Callable[..., Any]) -> None:
    """Replaces a method of a class or a module: ``new(original, ...)`` runs where ``kind.name(...)`` is called."""
    original = getattr(kind, name)
    setattr(kind, name, functools.wraps(original)(functools.partial(new, original)))
    if isinstance(kind, type):  # a partial is no method
        answering = getattr(kind, name)

        @functools.wraps(original)
        def call_replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return answering(self, *args, **kwargs)

        setattr(kind, name, call_replacement)


def replace_function(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces a function by ``new(original, ...)`` under every name that refers to it, in scripts as well."""

    @functools.wraps(original)
    def call_replacement(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [key for key, value in list(names.items()) if value is original]:
            setattr(module, name, call_replacement)
