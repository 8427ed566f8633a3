"""The models that are compared, in Keras: of TensorFlow, 3 or 2, and of Keras 3 on JAX. No TensorFlow is imported here.

Those of PyTorch (torch_models.py) have the same layers, sizes and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
# GPT-like and LSTM: words, of which so many are a row; ViT has as many patches.
WORDS, LENGTH, WIDTH, HEADS, DEPTH = 8192, 64, 256, 8, 4
CLASSES = 100_000
IMAGE, PATCH = 64, 8
DENSE, TABLES, ROWS, VECTOR = 13, 26, 10_000, 16  # of DLRM

Features = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    Attributes:
        batch: rows of the global batch.
        make: gives the model, made of a module with Keras' names.
        inputs: global batch from a generator: (features, labels).
        optimizer: name of a Keras optimizer.
        policy: in which types Keras computes.
    """

    batch: int
    make: Callable[[Any], Any]
    inputs: Callable[[np.random.Generator], tuple[Features, np.ndarray]]
    optimizer: str
    policy: str = "float32"


def resnet50(keras: Any) -> Any:
    shape = (IMAGE, IMAGE, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=10, classifier_activation=None)


def _blocks(layers: Any, hidden: Any, causal: bool) -> Any:
    """Transformer blocks whose normalisations stand before."""
    for _ in range(DEPTH):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, use_causal_mask=causal)
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normed))
    return layers.LayerNormalization()(hidden)


def gpt(keras: Any) -> Any:
    layers = keras.layers
    tokens, places = (layers.Input((LENGTH,), dtype="int32") for _ in range(2))
    hidden = layers.Embedding(WORDS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(places)
    return keras.Model([tokens, places], layers.Dense(WORDS)(_blocks(layers, hidden, causal=True)))


def vit(keras: Any) -> Any:
    layers = keras.layers
    images, places = layers.Input((IMAGE, IMAGE, 3)), layers.Input((LENGTH,), dtype="int32")
    patches = layers.Reshape((LENGTH, WIDTH))(layers.Conv2D(WIDTH, PATCH, PATCH)(images))
    hidden = _blocks(layers, patches + layers.Embedding(LENGTH, WIDTH)(places), causal=False)
    return keras.Model([images, places], layers.Dense(10)(layers.GlobalAveragePooling1D()(hidden)))


def lstm(keras: Any) -> Any:
    layers = keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(2):
        hidden = layers.LSTM(WIDTH, return_sequences=True)(hidden)
    return keras.Model(tokens, layers.Dense(WORDS)(hidden))


def lstm_layers(keras: Any) -> Any:
    """The recurrent layers alone, without words."""
    layers = keras.layers
    recurrent = [layers.LSTM(WIDTH, return_sequences=True) for _ in range(2)]
    return keras.Sequential([layers.Input((LENGTH, WIDTH)), *recurrent, layers.Dense(10)])


def dlrm(keras: Any) -> Any:
    """Products of all pairs of what the tables and the dense features give, as in arXiv:1906.00091."""
    layers = keras.layers
    dense, ids = layers.Input((DENSE,)), layers.Input((TABLES,), dtype="int32")
    bottom = layers.Dense(VECTOR, activation="relu")(layers.Dense(64, activation="relu")(dense))
    vectors = [layers.Reshape((1, VECTOR))(bottom)]
    vectors += [layers.Embedding(ROWS, VECTOR)(ids[:, i : i + 1]) for i in range(TABLES)]
    stacked = layers.Concatenate(axis=1)(vectors)
    pairs = layers.Flatten()(layers.Dot(axes=2)([stacked, stacked]))
    top = layers.Dense(64, activation="relu")(
        layers.Dense(128, activation="relu")(layers.Concatenate()([bottom, pairs]))
    )
    return keras.Model([dense, ids], layers.Dense(2)(top))


def wide(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((2048,)), layers.Dense(2048, activation="relu"), layers.Dense(CLASSES)])


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.normal(size=shape).astype(np.float32)


def _below(generator: np.random.Generator, end: int, *shape: int) -> np.ndarray:
    return generator.integers(end, size=shape).astype(np.int32)


def _places(rows: int) -> np.ndarray:
    return np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))


def _images(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    return (_normal(generator, 16, IMAGE, IMAGE, 3),), _below(generator, 10, 16)


def _patches(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    return (_normal(generator, 16, IMAGE, IMAGE, 3), _places(16)), _below(generator, 10, 16)


def _words(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    text = _below(generator, WORDS, 16, LENGTH + 1)
    return (text[:, :-1].copy(),), text[:, 1:].copy()


def _words_in_places(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    (tokens,), labels = _words(generator)
    return (tokens, _places(16)), labels


def _sequences(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    return (_normal(generator, 16, LENGTH, WIDTH),), _below(generator, 10, 16, LENGTH)


def _clicks(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    return (_normal(generator, 1024, DENSE), _below(generator, ROWS, 1024, TABLES)), _below(generator, 2, 1024)


def _features(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
    return (_normal(generator, 32, 2048),), _below(generator, CLASSES, 32)


WORKLOADS = {
    "resnet50": Workload(16, resnet50, _images, "SGD"),
    "resnet50-amp": Workload(16, resnet50, _images, "SGD", "mixed_bfloat16"),
    "gpt": Workload(16, gpt, _words_in_places, "Adam"),
    "vit": Workload(16, vit, _patches, "Adam"),
    "dlrm": Workload(1024, dlrm, _clicks, "SGD"),
    "lstm": Workload(16, lstm, _words, "Adam"),
    "lstm-layers": Workload(16, lstm_layers, _sequences, "Adam"),
    "fc": Workload(32, wide, _features, "SGD"),
}
