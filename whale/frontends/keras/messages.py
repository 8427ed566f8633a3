"""Shows what Keras warns of once, and not once a rank: all ranks run one program, and so get the same warnings."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

from whale.runtime.context import find_running

_PACKAGES = ("keras", "tf_keras")
_LOGGERS = ("absl", "tensorflow")  # to which Keras 3 and Keras 2 log


def install() -> None:
    """Has ranks other than the first, while a run goes on, show no warning and log no record of Keras'."""
    if not hasattr(warnings.showwarning, "_whale_original"):
        warnings.showwarning = _show_first(warnings.showwarning)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_logged)  # once, however often it is added


def _show_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def show_first(*args: Any, **kwargs: Any) -> None:
        if not (_is_other_rank() and _find_warner() in _PACKAGES):
            original(*args, **kwargs)

    show_first._whale_original = original  # type: ignore[attr-defined]
    return show_first


def _is_logged(record: logging.LogRecord) -> bool:
    parts = record.pathname.replace("\\", "/").split("/")
    return not (_is_other_rank() and any(package in parts for package in _PACKAGES))


def _is_other_rank() -> bool:
    context = find_running()
    if context is None or context.solo or context.planning.own_programs is not None:
        return False
    return context.has_other_processes and context.rank != 0


def _find_warner() -> str:
    """Returns the package of whoever called ``warnings.warn``, whatever line the warning is said to be of."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "warnings", "_py_warnings"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
