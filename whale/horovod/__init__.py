"""``import whale.horovod as hvd``: a script written for Horovod runs with this line changed.

The modules below are laid out as Horovod's. This one has what ``horovod.tensorflow`` has, and ``callbacks`` for
the Keras that ``tf.keras`` is.
"""

from typing import Any

from whale.horovod.tensorflow import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in ("callbacks", "load_model"):
        raise AttributeError(f"module 'whale.horovod' has no attribute {name!r}")
    from whale.horovod.tensorflow import keras

    return getattr(keras, name)
