"""A step of which nothing is divided says so, once, and says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

X = np.ones((8, 3), np.float32)
W = tf.ones([3, 2])


def looped(iterator: Any) -> Any:
    total = 0.0
    for _ in tf.range(2):
        total += tf.reduce_sum(tf.matmul(next(iterator), W))
    return total


def over_dataset(dataset: Any) -> Any:
    total = 0.0
    for x in dataset:
        total += tf.reduce_sum(tf.matmul(x, W))
    return total


def no_rows(rate: Any) -> Any:
    return rate * tf.reduce_sum(tf.matmul(tf.constant(X) * rate, W))


def masked(x: Any) -> Any:
    return tf.reduce_sum(tf.matmul(tf.boolean_mask(2 * x, x[:, 0] > 0), W))


def without_repeats(x: Any) -> Any:
    return tf.reduce_sum(tf.matmul(tf.reshape(tf.unique(tf.reshape(x, [-1]))[0], [-1, 1]), W[:1]))


@pytest.mark.parametrize(
    ("step", "argument", "why", "action"),
    [
        (looped, lambda: iter(tf.data.Dataset.from_tensors(X).repeat()), "from an iterator", "for batch in wh.shard"),
        (over_dataset, lambda: tf.data.Dataset.from_tensors(X).repeat(2), "loops over a dataset", "take the loop out"),
        (no_rows, lambda: np.float32(1), "none of its arguments has rows", "pass it the batch"),
        (masked, lambda: X, "the rows of its batch (x) end at `Where` (boolean_mask/Where)", "each row by itself"),
        (without_repeats, lambda: X, "the rows of its batch (x) end at `Unique` (Unique)", "in front of the step"),
    ],
    ids=["iterator", "dataset", "scalar", "mask", "unique"],
)
def test_it_is_said_once(
    ranks: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    step: Callable[[Any], Any],
    argument: Callable[[], Any],
    why: str,
    action: str,
) -> None:
    ranks(2)
    spread = wh.function(step)
    expected = float(step(argument()))
    assert [float(spread(argument())) for _ in range(2)] == [expected] * 2
    spread.plan(argument())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"whale: every rank computes the whole program `{step.__name__}`, since ")
    assert why in line and action in line


def test_a_divided_step_says_nothing(ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2)
    wh.function(lambda x: tf.reduce_sum(tf.matmul(x, W)))(X)
    wh.function(lambda it: tf.reduce_sum(tf.matmul(next(it), W)))(iter(tf.data.Dataset.from_tensors(X)))
    wh.function(lambda x: x + 1)(np.float32(1))  # there is nothing to divide
    assert not capsys.readouterr().err


def test_one_rank_says_nothing(ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    ranks(1)
    wh.function(no_rows)(np.float32(1))
    assert not capsys.readouterr().err


def test_wide_weights_are_named_once(ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, **{"debug.log": "info"})
    weight = tf.Variable(tf.ones((512, 8192)), name="wide")

    @wh.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(tf.matmul(x, weight)) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    for rows in (4, 8):
        step(np.ones((rows, 512), np.float32))
    (line,) = capsys.readouterr().err.splitlines()
    assert "of 16.0 MiB of gradients that the ranks of `step` all-reduce in a step, 16.0 MiB are of wide" in line
