"""Steps of Keras 2, which AutoGraph leaves as they are, and their layers, which it rewrites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import tf_convert
from tensorflow.python.autograph.pyct.transpiler import PyToPy

from whale.frontends.keras.steps import BatchStep


def test_only_layers_are_rewritten(ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten: list[str] = []
    original = PyToPy.transform_function

    def note(transpiler: Any, function: Any, context: Any) -> Any:
        rewritten.append(function.__name__)
        return original(transpiler, function, context)

    monkeypatch.setattr(PyToPy, "transform_function", note)

    def call(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            return x * 2
        return x

    def train_step(batch: Any) -> tf.Tensor:
        return tf.reduce_sum(tf_convert(call, control_status_ctx(), convert_by_default=False)(batch[0]))

    ranks(2)
    step = BatchStep("train_step", train_step, jit_compile=False, autograph=True)
    assert [float(step((tf.constant(sign * np.ones((4, 2))),))) for sign in (1, -1)] == [16.0, -8.0]
    assert rewritten == ["call"]
