"""Group and layer normalisation, weight decay written into the loss."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.zoo.case import Case, Program, Setting
from tests.zoo.keras_step import classifier_batch, classifier_loss, cross_entropy, keras_program

CLASSES = 4


def group_norm(setting: Setting) -> Program:
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((6, 6, 4)),
                layers.Conv2D(8, 3, padding="same"),
                layers.GroupNormalization(groups=2),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (6, 6, 4), CLASSES))


def layer_norm(setting: Setting) -> Program:
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((10,)),
                layers.Dense(12, activation="gelu"),
                layers.LayerNormalization(),
                layers.Dense(CLASSES),
            ]
        )

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        decay = tf.add_n([tf.nn.l2_loss(kernel) for kernel in model.trainable_variables if len(kernel.shape) > 1])
        return cross_entropy(y, model(x, training=True)) + 0.01 * decay

    return keras_program(setting, model, loss, ("x", "y"), classifier_batch(setting, (10,), CLASSES))


CASES = (Case("group_norm", group_norm), Case("layer_norm", layer_norm))
