"""Seven training programs whose predicted step time and memory are compared with what they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    Attributes:
        batch: rows of the global batch.
        make: gives the model.
        inputs: global batch from a generator: features (one array or several), labels.
        optimizer: name of a Keras optimizer.
    """

    batch: int
    make: Callable[[], Any]
    inputs: Callable[[np.random.Generator, int], tuple[tuple[np.ndarray, ...], np.ndarray]]
    optimizer: str


layers = tf.keras.layers


def mlp() -> Any:
    dense = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return tf.keras.Sequential([layers.Input((784,)), *dense, layers.Dense(1000)])


def convnet() -> Any:
    def block(width: int) -> list[Any]:
        return [layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()]

    return tf.keras.Sequential(
        [layers.Input((32, 32, 3)), *block(32), *block(32), layers.MaxPooling2D(), *block(64), *block(64),
         layers.MaxPooling2D(), *block(128), layers.GlobalAveragePooling2D(), layers.Dense(100)]
    )  # fmt: skip


WORDS, LENGTH, WIDTH, HEADS = 4096, 64, 256, 8


def _blocks(hidden: Any, depth: int, causal: bool) -> Any:
    for _ in range(depth):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, use_causal_mask=causal)
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normed))
    return layers.LayerNormalization()(hidden)


def gpt() -> Any:
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(tf.range(LENGTH)[None, :])
    return tf.keras.Model(tokens, layers.Dense(WORDS)(_blocks(hidden, 2, True)))


PATCH, SIDE = 4, 32


def vit() -> Any:
    image = layers.Input((SIDE, SIDE, 3))
    patches = layers.Conv2D(WIDTH, PATCH, PATCH)(image)
    hidden = layers.Reshape(((SIDE // PATCH) ** 2, WIDTH))(patches)
    hidden = hidden + layers.Embedding((SIDE // PATCH) ** 2, WIDTH)(tf.range((SIDE // PATCH) ** 2)[None, :])
    return tf.keras.Model(image, layers.Dense(100)(layers.GlobalAveragePooling1D()(_blocks(hidden, 2, False))))


TABLES, ROWS, FACTORS, DENSE = 8, 20_000, 32, 64


def dlrm() -> Any:
    dense, ids = layers.Input((DENSE,)), layers.Input((TABLES,), dtype="int32")
    bottom = layers.Dense(FACTORS, activation="relu")(layers.Dense(512, activation="relu")(dense))
    rows = [layers.Embedding(ROWS, FACTORS)(ids[:, i]) for i in range(TABLES)]
    joined = layers.Concatenate()([bottom, *rows])
    hidden = layers.Dense(1024, activation="relu")(layers.Dense(1024, activation="relu")(joined))
    return tf.keras.Model([dense, ids], layers.Dense(2)(hidden))


TURNS, FREQUENCIES = 16, 64


def lstm() -> Any:
    """Its step has a loop forward, and another one for the gradients."""
    return tf.keras.Sequential([layers.Input((TURNS, FREQUENCIES)), layers.LSTM(128), layers.Dense(100)])


CLASSES = 20_000


def classifier() -> Any:
    return tf.keras.Sequential([layers.Input((512,)), layers.Dense(512, activation="relu"), layers.Dense(CLASSES)])


def _labels(generator: np.random.Generator, rows: int, classes: int) -> np.ndarray:
    return generator.integers(classes, size=rows).astype(np.int32)


def _images(generator: np.random.Generator, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    images = generator.normal(size=(rows, SIDE, SIDE, 3)).astype(np.float32)
    return (images,), _labels(generator, rows, 100)


def _features(width: int, classes: int) -> Callable[[np.random.Generator, int], Any]:
    def inputs(generator: np.random.Generator, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        return (generator.normal(size=(rows, width)).astype(np.float32),), _labels(generator, rows, classes)

    return inputs


def _sounds(generator: np.random.Generator, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    return (generator.normal(size=(rows, TURNS, FREQUENCIES)).astype(np.float32),), _labels(generator, rows, 100)


def _words(generator: np.random.Generator, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    text = generator.integers(WORDS, size=(rows, LENGTH + 1)).astype(np.int32)
    return (text[:, :-1].copy(),), text[:, 1:].copy()


def _clicks(generator: np.random.Generator, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    dense = generator.normal(size=(rows, DENSE)).astype(np.float32)
    ids = generator.integers(ROWS, size=(rows, TABLES)).astype(np.int32)
    return (dense, ids), _labels(generator, rows, 2)


WORKLOADS = {
    "mlp": Workload(128, mlp, _features(784, 1000), "Adam"),
    "convnet": Workload(64, convnet, _images, "SGD"),
    "gpt": Workload(16, gpt, _words, "Adam"),
    "vit": Workload(16, vit, _images, "Adam"),
    "dlrm": Workload(512, dlrm, _clicks, "SGD"),
    "classifier": Workload(64, classifier, _features(512, CLASSES), "SGD"),
    "lstm": Workload(1024, lstm, _sounds, "SGD"),
}


def make_step(
    workload: Workload, function: Callable[..., Any], scope: Callable[[], Any]
) -> tuple[Any, tuple[Any, ...]]:
    """(a training step, its arguments: a global batch)."""
    tf.keras.utils.set_random_seed(1)
    model = workload.make()
    optimizer = tf.keras.optimizers.get({"class_name": workload.optimizer, "config": {"learning_rate": 1e-3}})
    optimizer.build(model.trainable_variables)
    weights = model.trainable_variables

    def step(labels: tf.Tensor, *features: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with scope():
                logits = model(features if len(features) > 1 else features[0], training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
                loss = tf.reduce_mean(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    features, labels = workload.inputs(np.random.default_rng(0), workload.batch)
    return function(step), (tf.constant(labels), *map(tf.constant, features))
