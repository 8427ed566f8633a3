"""What is split inside of pipeline stages: two stages on two ranks each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.giant.experts import EXPERTS, FLOAT, TOKENS, WIDTH, Experts
from benchmarks.giant.measure import Line, Scopes, sgd, weight

WORDS = 8000
ACTIVATION = TOKENS * WIDTH * FLOAT
EACH = 2  # ranks of a stage


class Dense:
    """Two layers in each stage, divided by columns and then by rows."""

    def __init__(self, scopes: Scopes, dtype: Any, micro_batches: int = 1) -> None:
        self.scopes, self.dtype, self.micro_batches = scopes, dtype, micro_batches
        self.variables = self.weights()

    def weights(self) -> list[tf.Variable]:
        shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * 2
        return [weight(i, *shape, dtype=self.dtype) for i, shape in enumerate(shapes)]

    def batch(self, number: int) -> tuple[Any, ...]:
        return (tf.cast(np.random.default_rng(number).standard_normal((TOKENS, WIDTH), np.float32), self.dtype),)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.pipeline():
                loss = self.loss(x)
        sgd(loss, tape, self.variables)
        return loss

    def pipeline(self) -> AbstractContextManager[Any]:
        return (
            self.scopes.pipeline(num_micro_batch=self.micro_batches) if self.micro_batches > 1 else self.scopes.none()
        )

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        h = x
        for i in (0, 2):
            with self.scopes.stage(), self.scopes.split():
                h = tf.nn.relu(h @ self.variables[i]) @ self.variables[i + 1]
                if i:
                    return tf.reduce_mean(tf.square(h - x))
        return h


class Words(Dense):
    """An embedding in the first stage and a classifier in the second, both split."""

    def weights(self) -> list[tf.Variable]:
        return [weight(0, WORDS, WIDTH, dtype=self.dtype), weight(1, WIDTH, WORDS, dtype=self.dtype)]

    def batch(self, number: int) -> tuple[Any, ...]:
        return (tf.constant(np.random.default_rng(number).integers(WORDS, size=TOKENS), tf.int32),)

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        table, out = self.variables
        with self.scopes.stage(), self.scopes.split():
            h = tf.nn.embedding_lookup(table, x)
        with self.scopes.stage(), self.scopes.split():
            logits = tf.tanh(h) @ out
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=x, logits=logits))


class StagedExperts(Dense):
    """A layer of experts in each stage."""

    def weights(self) -> list[tf.Variable]:
        self.layers = [Experts(self.scopes, self.dtype, "einsum", groups=8) for _ in range(2)]
        return [v for layer in self.layers for v in (layer.router, layer.into, layer.out)]

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        with self.scopes.stage():
            h = self.layers[0].layer(x)
        with self.scopes.stage():
            return tf.reduce_mean(tf.square(self.layers[1].layer(h) - x))


def lines() -> list[Line]:
    """The rows about stages."""
    edges = 2 * ACTIVATION
    slots = 8 * EXPERTS * (-(-5 * TOKENS // (4 * 8 * EXPERTS))) * WIDTH * FLOAT // EACH
    routers = 2 * 2 * (WIDTH * EXPERTS + 1) * FLOAT
    # A result that is whole on both ranks of a stage goes to both of the next; three sums of activations.
    dense = 3 * 2 * ACTIVATION + EACH * edges
    words = edges + 2 * ACTIVATION + 2 * 3 * TOKENS * FLOAT
    found = [
        Line("wh.split inside wh.stage", Dense, dense),
        Line("embedding split inside a stage", Words, words),
        Line("experts in stages of 2 ranks", StagedExperts, 7 * slots + routers + edges),
    ]
    more = {"Dense": dense, "StagedExperts": 7 * slots + routers + edges}
    return found + [
        Line(f"{name}, 2 micro-batches", partial(made, micro_batches=2), more[made.__name__])
        for name, made in (("wh.split inside wh.stage", Dense), ("experts in stages of 2 ranks", StagedExperts))
    ]
