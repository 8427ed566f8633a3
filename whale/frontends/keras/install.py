"""Replaces Keras' methods by Whale's, now or when Keras is imported.

Without a run they do the same as Keras' own, so they stay: after ``wh.shutdown`` a model trains as before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from whale.errors import ProgramError
from whale.frontends.keras import messages
from whale.imports import change_when_imported
from whale.runtime.context import require_current

_FUNCTIONS = ("train_function", "test_function", "predict_function")

PACKAGES = ("keras", "tf_keras")


def install() -> None:
    """Changes the Keras that is imported, and any that will be."""
    messages.install()
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
