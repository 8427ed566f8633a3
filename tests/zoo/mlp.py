"""Multi-layer perceptrons: every optimizer, dense labels, lazily created optimizer variables, metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting
from tests.zoo.keras_step import classifier_batch, classifier_loss, cross_entropy, keras_program

FEATURES, CLASSES = 12, 4


def model_of() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


def mlp(setting: Setting) -> Program:
    with setting.scope():
        model = model_of()
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (FEATURES,), CLASSES))


def lazy(setting: Setting) -> Program:
    """The step's first call creates the optimizer's variables, as most scripts do."""
    with setting.scope():
        model = model_of()
    batch = classifier_batch(setting, (FEATURES,), CLASSES)
    return keras_program(setting, model, classifier_loss, ("x", "y"), batch, build_optimizer=False)


def dense_labels(setting: Setting) -> Program:
    """Softmax cross-entropy of label distributions, through Keras's loss class with label smoothing."""
    with setting.scope():
        model = model_of()
    criterion = tf.keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return criterion(y, model(x, training=True))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        labels = generator.integers(CLASSES, size=BATCH)
        return {
            "x": generator.normal(size=(BATCH, FEATURES)).astype(setting.dtype),
            "y": np.eye(CLASSES)[labels].astype(setting.dtype),
        }

    return keras_program(setting, model, loss, ("x", "y"), batch)


def metrics(setting: Setting) -> Program:
    """Fetches counts, extrema, a norm and a value per row beside the loss."""
    with setting.scope():
        model = model_of()

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = model(x, training=True)
        right = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), y)
        return {
            "loss": cross_entropy(y, logits),
            "correct": tf.reduce_sum(tf.cast(right, tf.int32)),
            "accuracy": tf.reduce_mean(tf.cast(right, logits.dtype)),
            "in_top_2": tf.reduce_sum(tf.cast(tf.math.in_top_k(y, tf.cast(logits, tf.float32), 2), tf.int32)),
            "largest": tf.reduce_max(logits),
            "smallest": tf.reduce_min(logits),
            "norm": tf.norm(logits),
            "any_right": tf.reduce_any(right),
            "all_right": tf.reduce_all(right),
            "spread": tf.math.reduce_std(logits),
            "rows/prediction": tf.argmax(logits, axis=1),
            "rows/logits": logits,
        }

    return keras_program(setting, model, loss, ("x", "y"), classifier_batch(setting, (FEATURES,), CLASSES))


CASES = (
    Case("mlp", mlp),
    Case("mlp_momentum", mlp, optimizers=("momentum",)),
    Case("mlp_amsgrad", mlp, optimizers=("amsgrad",)),
    Case("mlp_adamw", mlp, optimizers=("adamw",)),
    Case("mlp_rmsprop", mlp, optimizers=("rmsprop",)),
    Case("mlp_adagrad", mlp, optimizers=("adagrad",)),
    Case("mlp_adafactor", mlp, optimizers=("adafactor",)),
    Case("mlp_lamb", mlp, optimizers=("lamb",), flavours=("keras3",)),
    Case("mlp_ftrl", mlp, optimizers=("ftrl",)),
    Case("mlp_clipped", mlp, optimizers=("clipped",)),
    Case("mlp_lazy", lazy),
    Case("mlp_dense_labels", dense_labels),
    Case("mlp_metrics", metrics),
)
