"""The training programs that are compared: the same step under plain TensorFlow, Horovod and Whale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    Attributes:
        batch: rows of the global batch.
        make: gives the model.
        inputs: global batch from a generator: (features, labels).
        optimizer: name of a Keras optimizer.
        policy: in which types Keras computes.
    """

    batch: int
    make: Callable[[], Any]
    inputs: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    optimizer: str
    policy: str = "float32"


def resnet50() -> Any:
    return tf.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)


WORDS, LENGTH, WIDTH, HEADS, DEPTH = 8192, 64, 256, 8, 4


def gpt() -> Any:
    layers = tf.keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(tf.range(LENGTH)[None, :])
    for _ in range(DEPTH):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normed))
    return tf.keras.Model(tokens, layers.Dense(WORDS)(layers.LayerNormalization()(hidden)))


CLASSES = 100_000


def wide() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((2048,)), layers.Dense(2048, activation="relu"), layers.Dense(CLASSES)])


def _images(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return generator.normal(size=(16, 64, 64, 3)).astype(np.float32), generator.integers(10, size=16).astype(np.int32)


def _words(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    text = generator.integers(WORDS, size=(16, LENGTH + 1)).astype(np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def _features(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return (
        generator.normal(size=(32, 2048)).astype(np.float32),
        generator.integers(CLASSES, size=32).astype(np.int32),
    )


WORKLOADS = {
    "resnet50": Workload(16, resnet50, _images, "SGD"),
    "resnet50-amp": Workload(16, resnet50, _images, "SGD", "mixed_bfloat16"),
    "gpt": Workload(16, gpt, _words, "Adam"),
    "fc": Workload(32, wide, _features, "SGD"),
}


def make_step(
    workload: Workload,
    function: Callable[..., Any],
    tape: Callable[[Any], Any] = lambda tape: tape,
    rows: slice = slice(None),
    started: Callable[[Sequence[Any]], None] = lambda variables: None,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], float]:
    """A training step; each call runs one and returns its loss.

    Args:
        function: ``tf.function`` or what stands for it.
        tape: wraps the gradient tape (Horovod's does).
        rows: of the global batch that this process passes to the step.
        started: called with the variables before the first step.
        scope: what the model and its loss are called under.
    """
    tf.keras.utils.set_random_seed(1)
    tf.keras.mixed_precision.set_global_policy(workload.policy)
    model = workload.make()
    optimizer = tf.keras.optimizers.get({"class_name": workload.optimizer, "config": {"learning_rate": LEARNING_RATE}})
    optimizer.build(model.trainable_variables)
    started([v.value for v in (*model.variables, *optimizer.variables)])
    weights = [v.value for v in model.trainable_variables]  # TensorFlow's variables: Horovod knows no Keras 3

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            with scope():
                logits = tf.cast(model(x, training=True), tf.float32)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape(recorded).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    wrapped = function(step)
    x, y = (tf.constant(values[rows]) for values in workload.inputs(np.random.default_rng(0)))
    return lambda: float(wrapped(x, y))
