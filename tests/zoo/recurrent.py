"""Recurrent Keras models: LSTM, GRU, a masked bidirectional LSTM over embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting
from tests.zoo.keras_step import classifier_batch, classifier_loss, keras_program

STEPS, FEATURES, CLASSES, WORDS = 5, 6, 4, 20


def _recurrent(setting: Setting, make_layer: Any) -> Program:
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential([layers.Input((STEPS, FEATURES)), make_layer(layers), layers.Dense(CLASSES)])
    batch = classifier_batch(setting, (STEPS, FEATURES), CLASSES)
    return keras_program(setting, model, classifier_loss, ("x", "y"), batch)


def lstm(setting: Setting) -> Program:
    return _recurrent(setting, lambda layers: layers.LSTM(8))


def gru(setting: Setting) -> Program:
    return _recurrent(setting, lambda layers: layers.GRU(8))


def masked_bilstm(setting: Setting) -> Program:
    """Rows of different length: padding has the word 0 and is masked."""
    layers = tf.keras.layers
    with setting.scope():
        model = tf.keras.Sequential(
            [
                layers.Input((STEPS,), dtype="int32"),
                layers.Embedding(WORDS, 6, mask_zero=True),
                layers.Bidirectional(layers.LSTM(6)),
                layers.Dense(CLASSES),
            ]
        )

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        words = generator.integers(1, WORDS, size=(BATCH, STEPS))
        lengths = generator.integers(1, STEPS + 1, size=(BATCH, 1))
        return {
            "x": np.where(np.arange(STEPS) < lengths, words, 0).astype(np.int32),
            "y": generator.integers(CLASSES, size=BATCH).astype(np.int32),
        }

    return keras_program(setting, model, classifier_loss, ("x", "y"), batch)


CASES = (
    Case("lstm", lstm, heavy=True),
    Case("gru", gru, heavy=True),
    Case("masked_bilstm", masked_bilstm, heavy=True),
)
