"""Implements ``wh.distribute``, which says of one Keras model what holds for all of them."""

from __future__ import annotations

from typing import Any

from whale.errors import ProgramError
from whale.frontends.keras.install import install
from whale.runtime.run.context import require_current

_FUNCTIONS = ("train_function", "test_function", "predict_function")


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
