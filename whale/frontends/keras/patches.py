"""Replaces methods and functions of Keras; the replacements are only used during a run that distributes Keras."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from whale.runtime.context import find_running


def replace_method(kind: type, name: str, new: Callable[..., Any], before: Callable[[Any], None] | None = None) -> None:
    """Replaces method ``name`` of a class: during a run ``new(original, self, ...)`` is called instead.

    Args:
      kind: the class.
      name: name of the method.
      new: the replacement; ``original`` is the method that it replaces.
      before: called with the object before the original method, if no run is active; None: nothing is called.
    """
    setattr(kind, name, _wrap_during_run(getattr(kind, name), new, before))


def replace_function(module: Any, name: str, new: Callable[..., Any]) -> None:
    """Replaces a function in all modules of its package: during a run ``new(original, ...)`` is called instead."""
    original = getattr(module, name)
    answering = _wrap_during_run(original, new)
    package = module.__name__.partition(".")[0]
    for other in [m for key, m in list(sys.modules.items()) if key.partition(".")[0] == package and m is not None]:
        for attribute, value in list(vars(other).items()):
            if value is original:
                setattr(other, attribute, answering)


def _wrap_during_run(
    original: Callable[..., Any], new: Callable[..., Any], before: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_original_or_new(*args: Any, **kwargs: Any) -> Any:
        context = find_running()
        if context is None or context.solo or context.planning.own_programs is not None:
            if before is not None:
                before(args[0])
            return original(*args, **kwargs)
        return new(original, *args, **kwargs)

    call_original_or_new.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads constructors'
    return call_original_or_new
