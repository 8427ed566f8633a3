"""What needs all micro-batches, and no layer needs: rows of gradients in an optimizer's hands, assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import ALONE, SPREAD, Scopes
from whale.errors import PlanError

Start = Callable[..., None]
MICRO_BATCHES = {"pipeline.micro_batches": 2}


class Bags:
    """Rows of a table, looked up by what the input says, before two dense layers."""

    def __init__(self, scopes: Scopes, form: str, optimizer: Any) -> None:
        numbers = np.random.default_rng(1)
        shapes = ((12, 8), (8, 16), (16, 4))
        self.weights = [tf.Variable(numbers.standard_normal(s) * 0.3, dtype=tf.float64) for s in shapes]
        self.optimizer, self.scope = optimizer, scopes.split if form == "split" else scopes.replica
        self.optimizer.build(self.weights)

    def step(self, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        table, into, out = self.weights
        with tf.GradientTape() as tape:
            with self.scope():
                made = tf.tanh(tf.nn.embedding_lookup(table, ids) @ into) @ out
            loss = tf.reduce_mean(tf.square(made - y))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
        return loss


def trained(model: Bags, function: Callable[..., Any]) -> list[np.ndarray]:
    numbers, step, found = np.random.default_rng(2), function(model.step), []
    for _ in range(3):
        found.append(
            step(tf.constant(numbers.integers(0, 12, 8)), tf.constant(numbers.standard_normal((8, 4)))).numpy()
        )
    return found + [w.numpy() for w in model.weights]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adafactor": lambda: tf.keras.optimizers.Adafactor(0.05),
    "RMSprop": lambda: tf.keras.optimizers.RMSprop(0.05, epsilon=1e-5, centered=True),
    "clipped SGD": lambda: tf.keras.optimizers.SGD(0.1, clipnorm=0.3),
}


@pytest.mark.parametrize(
    ("name", "form", "shares"),
    [
        ("Adafactor", "replica", (1, 1)),
        ("Adafactor", "split", (1, 1)),
        ("Adafactor", "split", (1, 0, 1)),  # who has no rows exchanges them once all the same, as the others do
        ("RMSprop", "replica", (1, 1)),
        ("clipped SGD", "split", (1, 1)),
    ],
)
def test_optimizers_that_divide_rows_of_gradients_by_sums(
    ranks: Start, name: str, form: str, shares: tuple[int, ...]
) -> None:
    """Keras takes a branch if a sum is 0: rows of gradients wait there for sums of all micro-batches."""
    plain = trained(Bags(ALONE, form, OPTIMIZERS[name]()), tf.function)
    ranks(len(shares), **MICRO_BATCHES, **{"batch.shares": shares})
    for found, expected in zip(trained(Bags(SPREAD, form, OPTIMIZERS[name]()), wh.function), plain):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


class Asserting:
    """A layer that looks at its input and at what it makes before it goes on."""

    def __init__(self) -> None:
        self.weight = tf.Variable(tf.ones((4, 2), tf.float64))

    def step(self, x: tf.Tensor, most: tf.Tensor, most_of_all: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tf.debugging.assert_greater(x, tf.constant(0.0, tf.float64), "not positive")
            h = x @ self.weight
            checks = [
                tf.debugging.assert_less(h, most, message="a row is too large"),
                tf.debugging.Assert(tf.reduce_sum(h) < most_of_all, ["all rows are too large", tf.reduce_sum(h)]),
            ]
            with tf.control_dependencies(checks):
                loss = tf.reduce_mean(tf.square(tf.identity(h) @ tf.ones((2, 2), tf.float64)))
        self.weight.assign_sub(0.01 * tape.gradient(loss, self.weight))
        return loss


@pytest.mark.core
@pytest.mark.parametrize("said", ["a row is too large", "all rows are too large", "not positive"])
def test_assertions_are_of_all_micro_batches(ranks: Start, said: str) -> None:
    x = tf.constant(np.random.default_rng(3).uniform(0.1, 1, (8, 4)))
    found = []
    for function in (tf.function, wh.function):
        if function is wh.function:
            ranks(2, **MICRO_BATCHES)
        model = Asserting()
        step = function(model.step)
        many = tf.constant(1000.0, tf.float64)
        losses = [step(x, many, many).numpy() for _ in range(2)]
        found.append([*losses, model.weight.numpy()])
        h = x @ model.weight
        most = tf.reduce_max(h) if said == "a row is too large" else many
        most_of_all = tf.reduce_sum(h) * 0.99 if said == "all rows are too large" else many
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            step(-x if said == "not positive" else x, most, most_of_all)
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_what_a_layer_reads_is_refused_all_the_same(ranks: Start) -> None:
    ranks(2, **MICRO_BATCHES)
    weight = tf.Variable(tf.ones((4, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x @ weight
            loss = tf.reduce_mean((h / tf.norm(h)) @ weight)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    with pytest.raises(PlanError, match="a value of all micro-batches"):
        wh.function(step)(tf.ones((8, 4)))
