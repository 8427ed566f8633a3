"""Replaces Keras' methods by Whale's, now or when Keras is imported.

Without a run they do the same as Keras' own, so they stay: after ``wh.shutdown`` a model trains as before.

While a run goes on, ranks other than the first show no warning of Keras' and log no record of its loggers: all ranks
run one program, and so get the same warnings.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from whale.errors import ProgramError
from whale.imports import change_when_imported
from whale.runtime.context import find_running, require_current

_FUNCTIONS = ("train_function", "test_function", "predict_function")
PACKAGES = ("keras", "tf_keras")
_PACKAGES = ("keras", "tf_keras")
_LOGGERS = ("absl", "tensorflow")  # to which Keras 3 and Keras 2 log


def install() -> None:
    """Changes the Keras that is imported, and any that will be."""
    _silence_other_ranks()
    change_when_imported(PACKAGES, _patch)


def _patch(package: ModuleType) -> None:
    if getattr(package, "_whale_changed", False) or not hasattr(package, "__version__"):
        return
    package._whale_changed = True  # type: ignore[attr-defined]
    if package.__version__.startswith("2."):
        from whale.frontends.keras import keras2

        keras2.patch_keras2(package.__name__)
    elif package.backend.backend() == "tensorflow":
        from whale.frontends.keras import keras3

        keras3.patch_keras3()


def distribute(model: Any) -> Any:
    """Makes ``fit``, ``evaluate``, ``predict`` and the ``..._on_batch`` of a Keras model run over the ranks.

    They do so for every model after ``wh.init``; this says it where the script should show it, and makes functions anew
    that the model has from before.

    Args:
      model: a model of Keras 3 with its TensorFlow backend, of tf_keras or of Keras 2.

    Returns:
      ``model``.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: it is no such model, or the ranks of this run train alone.
    """
    if require_current("wh.distribute()").solo:
        raise ProgramError(
            "wh.distribute in a run whose ranks train alone",
            given="wh.init(solo=True)",
            expected="a run that distributes what Keras does",
            action="leave out solo=True, or wh.distribute",
        )
    install()
    if not all(hasattr(model, name) for name in (*_FUNCTIONS, "make_train_function", "fit")):
        raise ProgramError(
            "wh.distribute takes Keras models",
            given=type(model).__name__,
            expected="a keras.Model, with the TensorFlow backend, or a tf_keras.Model",
            action="put wh.function around the step of a loop of your own",
        )
    for name in _FUNCTIONS:
        setattr(model, name, None)
    return model


def _silence_other_ranks() -> None:
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
