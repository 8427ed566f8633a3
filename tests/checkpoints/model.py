"""A small model with all kinds of state: weights, an optimizer's slots, a step count; in float64."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, INPUTS, HIDDEN, OUTPUTS = 12, 7, 24, 10


class Model:
    """Two dense layers under Adam with clipped gradients and weight decay.

    Args:
      function: ``tf.function`` or ``wh.function``.
      split: makes the scope in which the layers are built: ``wh.split``; None for no scope.
    """

    def __init__(self, function: Any, split: Any = contextlib.nullcontext) -> None:
        tf.keras.utils.set_random_seed(3)
        with split():
            layers = [tf.keras.layers.Dense(n, dtype="float64") for n in (HIDDEN, OUTPUTS)]
            layers[0].build((None, INPUTS))
            layers[1].build((None, HIDDEN))
        self.layers = layers
        self.weights = [w for layer in layers for w in layer.trainable_variables]
        self.optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3, weight_decay=0.01)
        self.optimizer.build(self.weights)
        self.done = tf.Variable(0, dtype=tf.int64, trainable=False, name="done")
        self.checkpoint = tf.train.Checkpoint(weights=self.weights, optimizer=self.optimizer, done=self.done)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with split():
                    out = layers[1](tf.tanh(layers[0](x)))
                loss = tf.reduce_mean(tf.square(out - y))
            slopes, _ = tf.clip_by_global_norm(tape.gradient(loss, self.weights), 0.5)
            self.optimizer.apply_gradients(zip(slopes, self.weights))
            self.done.assign_add(1)
            return loss

        self.step = function(step)

    def values(self) -> list[np.ndarray]:
        """Weights, the optimizer's variables and the count of steps, whole. Collective where they lie split."""
        return [tf.convert_to_tensor(v).numpy() for v in (*self.weights, *self.optimizer.variables, self.done)]


def batch(number: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The batch of a step, the same whenever it is asked for."""
    generator = np.random.default_rng(number)
    return tf.constant(generator.standard_normal((ROWS, INPUTS))), tf.constant(
        generator.standard_normal((ROWS, OUTPUTS))
    )
