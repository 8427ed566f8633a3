"""Variables that a step creates have the first values that tf.function would have given them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import CaptureError

X = np.random.default_rng(0).normal(size=(26, 4))
BIG = tf.constant(np.random.default_rng(1).normal(size=(40, 4)))  # captured as a tensor, not as a constant


class Averages:
    """A step that creates copies of a weight before and after its update, a copy of a copy, and values of its batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.weight = tf.Variable(np.ones((4, 1)))
        self.made: dict[str, tf.Variable] = {}
        self.step = function(self.take)

    def take(self, x: tf.Tensor) -> tf.Tensor:
        """Takes a step."""
        first = not self.made
        if first:
            self.made["momentum"] = tf.Variable(tf.zeros_like(self.weight))
            self.made["slow"] = tf.Variable(self.weight)
            self.made["big"] = tf.Variable(lambda: BIG)
            with tf.init_scope():  # outside of the step, where its value is known at once
                self.made["outside"] = tf.Variable(tf.ones((2, 3)))
                assert float(tf.reduce_sum(self.made["outside"])) == 6.0
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.dropout(x, 0.5, seed=7) @ self.weight - x[:, :1]) ** 2)
        self.made["momentum"].assign(0.9 * self.made["momentum"] + tape.gradient(loss, self.weight))
        self.weight.assign_sub(0.1 * self.made["momentum"])
        if first:
            self.made["ema"] = tf.Variable(2.0 * self.weight)
            self.made["center"] = tf.Variable(tf.reduce_mean(x, 0))
            self.made["more"] = tf.Variable(self.made["ema"] + tf.reshape(self.made["center"], (4, 1)))
        for name in ("slow", "ema", "more"):
            self.made[name].assign(0.5 * (self.made[name] + self.weight))
        return loss + tf.reduce_sum(self.made["center"]) + tf.reduce_sum(self.made["big"])


def trained(function: Callable[..., Any]) -> list[np.ndarray]:
    """The losses of steps over batches of two sizes, then the variables."""
    tf.random.set_seed(3)
    averages = Averages(function)
    losses = [averages.step(X[i : i + 8]) for _ in range(2) for i in range(0, 26, 8)]
    return [np.array([float(v) for v in losses]), *(v.numpy() for v in (averages.weight, *averages.made.values()))]


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 3])
def test_first_values_that_depend_on_the_first_call(ranks: Callable[..., None], zero: int) -> None:
    expected = trained(tf.function)
    ranks(2, **{"batch.random": "global", "memory.zero": zero, "memory.zero_min_bytes": 0})
    for found, wanted in zip(trained(wh.function), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


class Lookahead(keras.optimizers.SGD):
    """Weights that are pulled back to slow copies, which the first step creates."""

    def build(self, variables: Any) -> None:
        """Creates the slow weights."""
        if not self.built:
            super().build(variables)
            copy = [lambda shape, dtype, v=v: tf.convert_to_tensor(v) for v in variables]
            self.slow = [self.add_variable_from_reference(v, "slow", initializer=c) for v, c in zip(variables, copy)]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one weight and its slow copy."""
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign_add(0.5 * (variable - slow))
        variable.assign(slow)


def test_an_optimizer_that_copies_the_weights(ranks: Callable[..., None]) -> None:
    def fitted() -> list[float]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,), dtype="float64"), keras.layers.Dense(1, dtype="float64")])
        model.compile(Lookahead(0.1, momentum=0.5), "mse")
        return model.fit(X, X[:, 0], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    expected = fitted()
    ranks(2)
    np.testing.assert_allclose(fitted(), expected, rtol=1e-6)  # Keras' losses are float32


@pytest.mark.core
def test_functions_that_the_script_makes_eager(
    ranks: Callable[..., None], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    expected = trained(tf.function)
    ranks(2, **{"batch.random": "global"})
    request.addfinalizer(lambda: tf.config.run_functions_eagerly(False))
    tf.config.run_functions_eagerly(True)
    for found, one in zip(trained(wh.function), expected, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-10)
    assert capsys.readouterr().err.count("tf.config.run_functions_eagerly(True) leaves steps") == 1


@pytest.mark.core
def test_a_plan_is_asked_for_before_the_first_call(ranks: Callable[..., None]) -> None:
    ranks(2)
    averages = Averages(wh.function)
    averages.step.plan(X[:8])
    loss = float(averages.step(X[:8]))
    assert np.any(averages.made["slow"].numpy()) and np.isfinite(loss)


@pytest.mark.core
def test_what_has_no_first_value_names_the_next_step(ranks: Callable[..., None]) -> None:
    ranks(2)
    weight, made = tf.Variable(np.ones((4, 1))), []

    @tf.function
    def inner() -> tf.Tensor:
        if not made:
            made.append(tf.Variable(weight))
        return tf.reduce_sum(made[0])

    with pytest.raises(CaptureError, match=r"(?s)created inside of a function.*next: create the variable before"):
        wh.function(lambda x: tf.reduce_sum(x) + inner())(X)
    with pytest.raises(ValueError, match="only supports singleton"):
        wh.function(lambda x: tf.reduce_sum(x * tf.Variable(2.0, dtype=tf.float64)))(X)


class Late(tf.Module):
    """Creates its weights, their momentum and slow copies of them in the first call of its step."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight: Any = None
        self.momentum: Any = None
        self.slow: Any = None
        self.step = function(self.take)

    def take(self, x: tf.Tensor) -> tf.Tensor:
        """Takes a step."""
        if self.weight is None:
            self.weight = tf.Variable(tf.random.stateless_normal([4, 40], [1, 2], dtype=tf.float64))
            self.momentum = {"weight": tf.Variable(tf.zeros_like(self.weight))}
            self.slow = [tf.Variable(self.weight)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ self.weight - x[:, :1]) ** 2)
        self.momentum["weight"].assign(0.9 * self.momentum["weight"] + tape.gradient(loss, self.weight))
        self.slow[0].assign(0.5 * (self.slow[0] + self.weight - self.momentum["weight"]))
        self.weight.assign(self.slow[0])
        return loss


def resumed(function: Callable[..., Any], folder: Path) -> list[float]:
    """Returns the losses of a run of five steps, then of one that begins with a checkpoint of the first three."""
    whole, again = Late(function), Late(function)
    losses = [float(whole.step(X[:8])) for _ in range(3)]
    path = tf.train.Checkpoint(model=whole).write(str(folder / "weights"))
    losses += [float(whole.step(X[:8])) for _ in range(2)]
    checkpoint = tf.train.Checkpoint(model=again)
    checkpoint.read(path)  # before there is anything to read it into
    return losses + [float(again.step(X[:8])) for _ in range(2)]


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 3])
def test_values_of_a_checkpoint_stay(zero: int, ranks: Callable[..., None], tmp_path: Path) -> None:
    expected = resumed(tf.function, tmp_path)
    ranks(2, **{"memory.zero": zero, "memory.zero_min_bytes": 0})
    found = resumed(wh.function, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(found[5:], found[3:5], rtol=1e-12)


@pytest.mark.core
def test_a_checkpoint_of_a_part_of_them_is_refused(ranks: Callable[..., None], tmp_path: Path) -> None:
    saved = tf.Module()
    saved.slow = tf.Variable(np.ones((4, 1)))
    path = tf.train.Checkpoint(saved).write(str(tmp_path / "slow"))
    ranks(2)
    weight, made, other = tf.Variable(np.ones((4, 1))), tf.Module(), tf.Module()

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        made.slow, other.fast = tf.Variable(weight), tf.Variable(2.0 * weight)
        return tf.reduce_sum(x @ (made.slow + other.fast))

    checkpoint = tf.train.Checkpoint(made)
    checkpoint.read(path)
    with pytest.raises(CaptureError, match=r"(?s)only some of them.*next: create these variables before"):
        step(X[:8])
