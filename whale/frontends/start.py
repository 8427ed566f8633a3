"""Implements the public ``wh.init``, which also patches Keras and TensorFlow 1 for programs with those interfaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from whale.frontends import tf_checkpoints
from whale.frontends.keras import install as keras
from whale.frontends.tf1 import install as tf1
from whale.runtime import start
from whale.runtime.input import own_files

P = ParamSpec("P")


def _wrap_with_interfaces(begin: Callable[P, None]) -> Callable[P, None]:
    """Wraps ``begin``, so that Keras', TensorFlow 1's and tf.data's programs find the run; its arguments and docstring
    stay.
    """

    @functools.wraps(begin)
    def begin_and_install(*args: P.args, **kwargs: P.kwargs) -> None:
        begin(*args, **kwargs)
        keras.install()
        tf1.install()
        own_files.install()
        tf_checkpoints.install()

    return begin_and_install


init = _wrap_with_interfaces(start.init)
