"""Replaces methods of Keras so that models train over the ranks of a run; Keras may be imported before or after.

Without a run the replaced methods do what Keras' own do, so they stay in place after ``wh.shutdown``.

During a run only rank 0 shows Keras' warnings and log records, since all ranks would show the same ones.
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
_LOGGERS = ("absl", "tensorflow")  # to which Keras 3 and Keras 2 log


def install() -> None:
    """Patches Keras 3 and tf_keras, so that `fit`, layers, optimizers and saving run on the ranks of a run: packages
    that are imported now, and those that are imported later.

    Also keeps the other ranks from repeating the warnings that rank 0 shows.
    """
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
    """Makes ``fit``, ``evaluate``, ``predict`` and the ``..._on_batch`` methods of a Keras model run over all ranks.

    After ``wh.init`` this is so for every model; the call only shows it in the script. It also discards functions that
    the model has compiled before ``wh.init``.

    Args:
      model: a model of Keras 3 with the TensorFlow backend, tf_keras or Keras 2.

    Returns:
      ``model``.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: ``model`` is no such model, or the run was started with ``wh.init(solo=True)``.
    """
    if require_current("wh.distribute()").solo:
        raise ProgramError(
            "wh.distribute cannot be used in a run whose ranks train alone",
            given="wh.init(solo=True)",
            expected="wh.init() without solo=True",
            action="remove solo=True, or the call of wh.distribute",
        )
    install()
    if not all(hasattr(model, name) for name in (*_FUNCTIONS, "make_train_function", "fit")):
        raise ProgramError(
            "the argument of wh.distribute is not a Keras model",
            given=f"an object of type {type(model).__name__}",
            expected="a keras.Model, with the TensorFlow backend, or a tf_keras.Model",
            action="pass a Keras model; for a training loop of your own, decorate its step with wh.function",
        )
    for name in _FUNCTIONS:
        setattr(model, name, None)
    return model


def _silence_other_ranks() -> None:
    """Hides Keras' warnings and log records on ranks other than 0 during a run."""
    if not hasattr(warnings.showwarning, "_whale_original"):
        warnings.showwarning = _show_first(warnings.showwarning)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_logged)  # adding the same filter again has no effect


def _show_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def show_first(*args: Any, **kwargs: Any) -> None:
        if not (_is_other_rank() and _find_warner() in PACKAGES):
            original(*args, **kwargs)

    show_first._whale_original = original  # type: ignore[attr-defined]
    return show_first


def _is_logged(record: logging.LogRecord) -> bool:
    parts = record.pathname.replace("\\", "/").split("/")
    return not (_is_other_rank() and any(package in parts for package in PACKAGES))


def _is_other_rank() -> bool:
    context = find_running()
    if context is None or context.solo or context.planning.own_programs is not None:
        return False
    return context.has_other_processes and context.rank != 0


def _find_warner() -> str:
    """Returns the package that called ``warnings.warn``, whatever file the warning is attributed to by
    ``stacklevel``.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "warnings", "_py_warnings"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
