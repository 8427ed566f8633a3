"""The training step of a classifier, as several benchmarks take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def train_step(model: Any, optimizer: Any = None) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A step, with Adam by default, over inputs and their classes (integers); returns the loss."""
    optimizer = optimizer or tf.keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step
