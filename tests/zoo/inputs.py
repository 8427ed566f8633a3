"""Several inputs, weighted and masked losses, inputs that only look like a batch, embeddings, dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting
from tests.zoo.keras_step import classifier_batch, classifier_loss, cross_entropy, keras_program

CLASSES, WORDS = 4, 30


def _dense(features: int, classes: int = CLASSES) -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((features,)), layers.Dense(16, activation="relu"), layers.Dense(classes)])


def two_inputs(setting: Setting) -> Program:
    """Numbers and words per row, a scale that all rows share, a scalar; fetches one value per row."""
    layers = tf.keras.layers
    with setting.scope():
        numbers, words = layers.Input((6,)), layers.Input((3,), dtype="int32")
        embedded = layers.Flatten()(layers.Embedding(WORDS, 4)(words))
        joined = layers.Concatenate()([layers.Dense(8, activation="relu")(numbers), embedded])
        model = tf.keras.Model([numbers, words], layers.Dense(1)(layers.Dense(8, activation="tanh")(joined)))

    def loss(model: Any, x: tf.Tensor, words: tf.Tensor, y: tf.Tensor, scale: tf.Tensor, shift: Any) -> dict[str, Any]:
        prediction = tf.squeeze(model([x * scale, words], training=True), axis=1) + shift
        return {"loss": tf.reduce_mean(tf.abs(prediction - y)), "rows/prediction": prediction}

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": generator.normal(size=(BATCH, 6)).astype(setting.dtype),
            "words": generator.integers(WORDS, size=(BATCH, 3)).astype(np.int32),
            "y": generator.normal(size=BATCH).astype(setting.dtype),
            "scale": generator.uniform(0.5, 2.0, size=6).astype(setting.dtype),
            "shift": np.asarray(generator.normal(), setting.dtype),
        }

    return keras_program(setting, model, loss, ("x", "words", "y", "scale", "shift"), batch)


def weighted(setting: Setting) -> Program:
    """A weighted loss that is divided by the sum of a mask over the global batch."""
    with setting.scope():
        model = _dense(10)

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=True))
        kept = weight * tf.cast(mask, weight.dtype)
        return tf.math.divide_no_nan(tf.reduce_sum(kept * losses), tf.reduce_sum(tf.cast(mask, weight.dtype)))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return classifier_batch(setting, (10,), CLASSES)(generator) | {
            "weight": generator.uniform(0.1, 3.0, size=BATCH).astype(setting.dtype),
            "mask": generator.uniform(size=BATCH) < 0.6,
        }

    return keras_program(setting, model, loss, ("x", "y", "weight", "mask"), batch)


def lookalike(setting: Setting) -> Program:
    """A weight per class, with as many classes as the batch has rows: not a batch input, but of the same size."""
    with setting.scope():
        model = _dense(10, BATCH)

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor, class_weight: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=True))
        return tf.reduce_mean(losses * tf.gather(class_weight, y)) + 0.1 * class_weight[0] * tf.reduce_mean(losses)

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        weights = generator.uniform(0.1, 3.0, size=BATCH).astype(setting.dtype)
        return classifier_batch(setting, (10,), BATCH)(generator) | {"class_weight": weights}

    return keras_program(setting, model, loss, ("x", "y", "class_weight"), batch)


def embedding(setting: Setting) -> Program:
    """A bag of words: sparse gradients with repeated words within a row and between rows."""
    layers = tf.keras.layers
    with setting.scope():
        words = layers.Input((5,), dtype="int32")
        pooled = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 8)(words))
        model = tf.keras.Model(words, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(pooled)))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": np.minimum(generator.geometric(0.2, size=(BATCH, 5)), WORDS - 1).astype(np.int32),
            "y": generator.integers(CLASSES, size=BATCH).astype(np.int32),
        }

    return keras_program(setting, model, classifier_loss, ("x", "y"), batch)


def seeded_dropout(setting: Setting) -> Program:
    """Keras dropout with a seed: the mask of the global batch is the same however it is spread."""
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((12,)),
                layers.Dense(16, activation="relu"),
                layers.Dropout(0.4, seed=11),
                layers.Dense(CLASSES),
            ]
        )
    return keras_program(setting, model, classifier_loss, ("x", "y"), classifier_batch(setting, (12,), CLASSES))


def stateless_dropout(setting: Setting) -> Program:
    """Dropout from a counter-based stream, whose seed is an input of the step."""
    with setting.scope():
        model = _dense(12)

    def loss(model: Any, x: tf.Tensor, y: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        kept = tf.nn.experimental.stateless_dropout(x, rate=0.3, seed=seed)
        return cross_entropy(y, model(kept, training=True))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        seed = generator.integers(1000, size=2).astype(np.int32)
        return classifier_batch(setting, (12,), CLASSES)(generator) | {"seed": seed}

    return keras_program(setting, model, loss, ("x", "y", "seed"), batch)


CASES = (
    Case("two_inputs", two_inputs, row_inputs=("x", "words", "y")),
    Case("weighted", weighted, row_inputs=("x", "y", "weight", "mask")),
    Case("lookalike", lookalike),
    Case("embedding", embedding),
    Case("seeded_dropout", seeded_dropout, rows_commute=False),
    Case("stateless_dropout", stateless_dropout, rows_commute=False),
)
