"""Batches of many sizes: few of them are compiled for, the others share a program, and all equal one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current
from whale.runtime.input.traces import OWN_AFTER, OWN_PLANS, SizesOfTrace

SIZES = (8, 6, 5, 7, 4, 9, 3, 5)


def test_sizes_have_plans_when_they_come_first_or_often() -> None:
    sizes = SizesOfTrace()
    assert [sizes.wants_own(n, [(n, 3)]) for n in SIZES[:4]] == [True] * OWN_PLANS + [False] * (4 - OWN_PLANS)
    assert sizes.shapes == ((None, 3),)
    assert [sizes.wants_own(5, [(5, 3)]) for _ in range(OWN_AFTER)] == [False] * (OWN_AFTER - 2) + [True] * 2


def test_sizes_that_differ_are_unknown_and_need_another_step() -> None:
    sizes = SizesOfTrace()
    sizes.wants_own(1, [(8, 3), ()])
    sizes.step = "serves one size"
    sizes.wants_own(2, [(8, 4), ()])
    assert sizes.step is None
    assert sizes.shapes == ((8, None), ())
    sizes.wants_own(3, [(8, 4, 1), ()])
    assert sizes.shapes == (None, ())


def _train(function: Callable[..., Any], sizes: Sequence[int]) -> tuple[list[float], Any]:
    keras.utils.set_random_seed(3)
    weight = tf.Variable(np.ones([3, 4]))
    moving = tf.Variable(np.zeros([3, 4]))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.nn.dropout(tf.tanh(x @ weight), 0.4)
            noise = tf.random.normal([tf.shape(x)[0], 4], dtype=tf.float64)
            loss = tf.reduce_mean((tf.reduce_sum(hidden + 0.1 * noise, 1) - y) ** 2)
        gradient = tape.gradient(loss, weight)
        moving.assign(0.9 * moving + gradient)
        weight.assign_sub(0.05 * moving)
        return loss

    made = function(step, reduce_retracing=True)
    draw = np.random.default_rng(0)
    losses = []
    for n in sizes:
        x = draw.normal(size=(n, 3))
        losses.append(float(made(tf.constant(x), tf.constant(x.sum(1)))))
    return losses, weight.numpy()


@pytest.mark.parametrize("zero", [0, 2])
def test_shared_sizes_equal_one_device(ranks: Callable[..., None], zero: int) -> None:
    wanted, weight = _train(tf.function, SIZES * 2)
    ranks(2, **{"batch.random": "global", "memory.zero": zero, "memory.zero_min_bytes": 0})
    found, own = _train(wh.function, SIZES * 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_allclose(own, weight, rtol=1e-12)
    # Of the trace for the first size one, of that for the others two and the shared one.
    assert require_current("").programs == 1 + OWN_PLANS + 1


def test_a_step_that_has_to_know_its_sizes_is_compiled_for_each(ranks: Callable[..., None]) -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(2)

    class Model(keras.Model):
        def call(self, x: Any) -> Any:
            return layer(x) * float(x.shape[0])

    ranks(2)
    model = Model()
    for n in SIZES[:5]:
        model.predict_on_batch(np.ones([n, 3], np.float32))
    assert require_current("").programs == 5


@pytest.mark.parametrize("written", [True, False])
def test_loops_keep_rows_that_one_device_does_not_know(ranks: Callable[..., None], written: bool) -> None:
    """TensorFlow cannot tell the rows that an iteration leaves; those that enter it are known to Whale alone."""
    weight = tf.Variable(tf.cast(tf.linspace(-1.0, 1.0, 5)[None], tf.float64))

    def turn(best: Any, n: Any, of: Any) -> Any:
        found, _ = tf.math.top_k(tf.reshape(best[:, :, None] + of[:, None] * weight, (n, -1)), 3)
        return found - tf.reduce_mean(found)

    def search(x: Any) -> Any:
        n = tf.shape(x)[0]
        best = tf.zeros([n, 3], tf.float64)
        if written:
            for _ in tf.range(4):
                best = turn(best, n, x)
        else:
            (best,) = tf.while_loop(lambda best: True, lambda best: (turn(best, n, x),), (best,), maximum_iterations=4)
        return best

    def train(function: Callable[..., Any]) -> list[Any]:
        @function(input_signature=[tf.TensorSpec([None, 5], tf.float64)])
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                best = search(x)
                loss = tf.reduce_mean(tf.square(best - 1.0))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return best, loss

        weight.assign(tf.cast(tf.linspace(-1.0, 1.0, 5)[None], tf.float64))
        draw = np.random.default_rng(2)
        return [*[one for n in SIZES[:5] for one in step(tf.constant(draw.normal(size=(n, 5))))], weight.numpy()]

    wanted = train(tf.function)
    ranks(2)
    for found, one in zip(train(wh.function), wanted):
        np.testing.assert_allclose(found, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("adds", [lambda x, rows: tf.boolean_mask(x, x[:, 0] > 0), lambda x, rows: rows[:1]])
def test_rows_that_a_loop_adds_are_not_cut_off(ranks: Callable[..., None], adds: Callable[..., Any]) -> None:
    """Ranks hold parts of the rows that a batch has; a loop's variable has more after each iteration."""
    grows = [tf.TensorShape([]), tf.TensorShape([None, 3])]

    def step(x: Any) -> Any:
        def turn(i: Any, rows: Any) -> Any:
            return i + 1, tf.concat([rows * 2.0, adds(x, rows)], 0)

        _, rows = tf.while_loop(lambda i, rows: i < 3, turn, [0, x], shape_invariants=grows)
        return rows, tf.shape(rows)

    x = np.random.default_rng(4).normal(size=(8, 3))
    wanted = tf.function(step)(tf.constant(x))
    ranks(2)
    for found, one in zip(wh.function(step)(tf.constant(x)), wanted):
        np.testing.assert_allclose(found, one, rtol=1e-12)


def test_sparse_operands_of_other_sizes_are_of_one_trace(ranks: Callable[..., None]) -> None:
    def draw(function: Callable[..., Any]) -> list[float]:
        tf.random.set_seed(3)

        @function(input_signature=(tf.SparseTensorSpec([None, None], tf.float32),))
        def step(a: Any) -> Any:
            return tf.reduce_sum(tf.sparse.to_dense(a)) + tf.random.uniform([])

        return [float(step(tf.sparse.eye(n))) for n in (4, 5, 6, 4)]

    wanted = draw(tf.function)
    ranks(2, **{"batch.random": "global"})
    np.testing.assert_allclose(draw(wh.function), wanted, rtol=1e-6)


def test_ragged_batches_of_other_rows_share_a_program(ranks: Callable[..., None]) -> None:
    """The last batch of an epoch has one row: the program that all sizes share must not know that number."""
    rows = ([3, 1, 4, 2], [2, 2, 1, 5], [1, 6, 2, 2], [3], [4, 1, 1, 3], [2, 5, 3, 1])

    def draw(function: Callable[..., Any]) -> list[Any]:
        @function(input_signature=(tf.RaggedTensorSpec([None, None], tf.float64),))
        def step(values: Any) -> Any:
            return tf.reduce_max(values, axis=1), tf.reduce_sum(values, axis=1)

        batches = [tf.ragged.constant([[n / 7 + i for i in range(n)] for n in lengths], tf.float64) for lengths in rows]
        return [found.numpy() for batch in batches for found in step(batch)]

    wanted = draw(tf.function)
    ranks(2)
    for one, other in zip(draw(wh.function), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
