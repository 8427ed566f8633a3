"""Implements the public ``wh.init``, which also patches Keras, TensorFlow 1 and tf.data for scripts that use them."""

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
    """Returns ``begin``, the function that starts a run, extended by the patches of Keras, TensorFlow 1 and tf.data;
    its signature and docstring are kept.
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
