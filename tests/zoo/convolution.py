"""Convolutional models: batch norm, one dimension, transposed, separable and dilated."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting, flavour
from tests.zoo.keras_step import classifier_batch, classifier_loss, keras_program

CLASSES = 4


def convnet(setting: Setting) -> Program:
    """Convolution, batch norm (training statistics over the global batch), pooling; a bias before one batch norm."""
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((10, 10, 3)),
                layers.Conv2D(8, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.MaxPooling2D(),
                layers.Conv2D(12, 3, strides=2, padding="same"),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(CLASSES),
            ]
        )
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (10, 10, 3), CLASSES))


def mobilenet(setting: Setting) -> Program:
    """MobileNetV2 at 64x64, alpha 0.35.

    Forty batch norms over few values of little variance amplify rounding by a factor of 50 per step: two orders of
    the same rows part by 1e-1 in the second step of float32. So the case runs two steps, in float64.
    """
    with setting.scope():
        model = tf.keras.applications.MobileNetV2(
            (64, 64, 3), alpha=0.35, weights=None, classes=CLASSES, classifier_activation=None
        )
    batch = classifier_batch(setting, (64, 64, 3), CLASSES)
    return keras_program(setting, model, classifier_loss, ("x", "y"), batch, rate_scale=0.1)


def conv1d(setting: Setting) -> Program:
    """Causal and strided one-dimensional convolutions."""
    return _conv1d(setting, strides=2)


def dilated(setting: Setting) -> Program:
    """A dilated convolution: its gradients, and the convolution of Keras 2, go through SpaceToBatchND.

    That op puts blocks outside rows in dimension 0. A layout divides the outer part of a dimension, so these products
    run whole on every rank.
    """
    return _conv1d(setting, dilation_rate=2)


def _conv1d(setting: Setting, **options: int) -> Program:
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((12, 5)),
                layers.Conv1D(8, 3, padding="causal", activation="relu"),
                layers.Conv1D(8, 3, padding="same", activation="tanh", **options),
                layers.AveragePooling1D(2),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (12, 5), CLASSES))


def separable(setting: Setting) -> Program:
    """Depthwise, separable and grouped-by-hand convolutions with average pooling and zero padding."""
    layers = tf.keras.layers
    with setting.scope():
        entry = layers.Input((8, 8, 4))
        hidden = layers.DepthwiseConv2D(3, padding="same", activation="relu")(entry)
        hidden = layers.ZeroPadding2D(1)(hidden)
        hidden = layers.SeparableConv2D(8, 3, strides=2, activation="relu")(hidden)
        hidden = layers.AveragePooling2D(2)(hidden)
        hidden = layers.Concatenate()([hidden, layers.Conv2D(4, 1)(hidden)])
        model = tf.keras.Model(entry, layers.Dense(CLASSES)(layers.Flatten()(hidden)))
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (8, 8, 4), CLASSES))


def autoencoder(setting: Setting) -> Program:
    """Transposed convolutions and up-sampling against a mean squared error."""
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((8, 8, 2)),
                layers.Conv2D(6, 3, strides=2, padding="same", activation="elu"),
                layers.Conv2DTranspose(6, 3, strides=2, padding="same", activation="elu"),
                layers.Conv2D(4, 3, strides=2, padding="same", activation="elu"),
                layers.UpSampling2D(2),
                layers.Conv2D(2, 3, padding="same"),
            ]
        )

    def loss(model: Any, x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.math.squared_difference(model(x, training=True), x))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": generator.normal(size=(BATCH, 8, 8, 2)).astype(setting.dtype)}

    return keras_program(setting, model, loss, ("x",), batch)


def grouped(setting: Setting) -> Program:
    """A residual block with a grouped convolution, and three dimensions with the channels first.

    TensorFlow has no CPU kernels for the gradients of the first and for the second; Keras has XLA compile them.
    """
    layers = tf.keras.layers
    with setting.scope():
        entry = layers.Input((6, 6, 4))
        before = layers.Conv2D(8, 1, strides=2)(entry)
        hidden = layers.Conv2D(8, 1, activation="relu")(entry)
        hidden = layers.Conv2D(8, 3, strides=2, padding="same", groups=4, use_bias=False)(hidden)
        hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
        hidden = layers.Add()([before, layers.Conv2D(8, 1)(hidden)])
        if flavour() == "keras3":
            hidden = layers.Reshape((8, 1, 3, 3))(layers.Permute((3, 1, 2))(hidden))
            hidden = layers.Conv3D(4, (1, 2, 2), activation="tanh", data_format="channels_first")(hidden)
        model = tf.keras.Model(entry, layers.Dense(CLASSES)(layers.Flatten()(hidden)))
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (6, 6, 4), CLASSES))


CASES = (
    Case("convnet", convnet),
    Case("mobilenet", mobilenet, dtypes=("float64",), steps=2, heavy=True),
    Case("conv1d", conv1d),
    Case("dilated", dilated),
    Case("separable", separable),
    Case("autoencoder", autoencoder),
    Case("grouped", grouped, heavy=True),
)
