"""A two-layer GPT-like model: Keras attention with a causal mask, layer norm, tied nothing, loss over all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting
from tests.zoo.keras_step import cross_entropy, keras_program

WORDS, LENGTH, WIDTH, HEADS, DEPTH = 24, 6, 16, 2, 2


def gpt(setting: Setting) -> Program:
    layers = tf.keras.layers
    with setting.scope():
        tokens = layers.Input((LENGTH,), dtype="int32")
        hidden = layers.Embedding(WORDS, WIDTH)(tokens)
        # The same positions for every row: a value that does not depend on the batch joins one that does.
        positions = layers.Embedding(LENGTH, WIDTH)
        hidden = layers.Add()([hidden, positions(tf.range(LENGTH)[None, :])])
        for _ in range(DEPTH):
            normed = layers.LayerNormalization()(hidden)
            attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, use_causal_mask=True)
            hidden = layers.Add()([hidden, attended])
            normed = layers.LayerNormalization()(hidden)
            hidden = layers.Add()([hidden, layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="gelu")(normed))])
        model = tf.keras.Model(tokens, layers.Dense(WORDS)(layers.LayerNormalization()(hidden)))

    def loss(model: Any, x: tf.Tensor) -> tf.Tensor:
        return cross_entropy(x[:, 1:], model(x, training=True)[:, :-1])

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": generator.integers(WORDS, size=(BATCH, LENGTH)).astype(np.int32)}

    return keras_program(setting, model, loss, ("x",), batch)


CASES = (Case("gpt", gpt, heavy=True),)
