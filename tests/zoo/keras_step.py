"""The training step that the Keras cases share: forward, loss, gradients, one optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Program, Setting, function_program
from tests.zoo.optimizers import keras_optimizer, learning_rate

Loss = Callable[..., "tf.Tensor | Mapping[str, tf.Tensor]"]


def keras_program(
    setting: Setting,
    model: Any,
    loss: Loss,
    inputs: Sequence[str],
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]],
    build_optimizer: bool = True,
    rate_scale: float = 1.0,
) -> Program:
    """A step around a Keras model.

    Args:
        loss: called with the model and the inputs; returns the scalar loss, or a mapping that has `loss` and more
            values to fetch.
        rate_scale: factor on the optimizer's usual learning rate.
        build_optimizer: create the optimizer's variables now; otherwise the first call of the step does.
    """
    rate = rate_scale * learning_rate(setting.optimizer)
    optimizer = keras_optimizer(setting.optimizer, rate)
    if build_optimizer:
        optimizer.build(model.trainable_variables)

    def step(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        with setting.scope(), tf.GradientTape() as tape:
            found = loss(model, *values)
            results = dict(found) if isinstance(found, Mapping) else {"loss": found}
        trained = model.trainable_variables
        gradients = tape.gradient(results["loss"], trained)
        optimizer.apply_gradients(zip(gradients, trained, strict=True))
        return results | dense_gradients(setting, gradients)

    def variables() -> list[Any]:
        kept = optimizer.variables
        # A method until Keras 2.10's legacy optimizers, a property since.
        return [*model.variables, *(kept() if callable(kept) else kept)]

    return function_program(setting, step, inputs, make_batch, variables, rate)


def dense_gradients(setting: Setting, gradients: Sequence[Any]) -> dict[str, tf.Tensor]:
    """The gradients to fetch, by position; sparse ones (IndexedSlices) are left to the weights to witness."""
    if not setting.gradients:
        return {}
    return {
        f"gradient/{index:03d}": gradient for index, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)
    }


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of integer labels."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def classifier_loss(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of a model that returns logits."""
    return cross_entropy(y, model(x, training=True))


def classifier_batch(
    setting: Setting, shape: tuple[int, ...], classes: int
) -> Callable[[np.random.Generator], dict[str, np.ndarray]]:
    """Makes batches of `x` [BATCH, *shape] (normal) and `y` [BATCH] (int32 labels)."""

    def make(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": generator.normal(size=(BATCH, *shape)).astype(setting.dtype),
            "y": generator.integers(classes, size=BATCH).astype(np.int32),
        }

    return make
