"""Several batches in one tensor, [k, rows, ...], of which a loop takes one after the other: the rows are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

K, ROWS = 3, 8
X = np.random.default_rng(0).random((K, ROWS, 3))
Y = X[:, :, :1] * 2


def ranged(one: Any, xs: Any, ys: Any) -> Any:
    total = tf.zeros([], xs.dtype)
    for i in tf.range(K):
        total += one(xs[i], ys[i])
    return total


def gathered(one: Any, xs: Any, ys: Any) -> Any:
    total, i = tf.zeros([], xs.dtype), 0
    while i < tf.shape(xs)[0] and total < 1e9:
        total += one(tf.gather(xs, i), tf.gather(ys, i))
        i += 1
    return total


def unrolled(one: Any, xs: Any, ys: Any) -> Any:
    return tf.add_n([one(xs[i], ys[i]) for i in range(K)])


def unstacked(one: Any, xs: Any, ys: Any) -> Any:
    return tf.add_n([one(x, y) for x, y in zip(tf.unstack(xs), tf.unstack(ys))])


def whole(one: Any, xs: Any, ys: Any) -> Any:
    """The stack is also read at once, so that dimension 0 has rows."""
    return ranged(one, xs, ys) + tf.reduce_sum(xs)


def trained(function: Any, steps: Any, xs: Any, ys: Any) -> tuple[Any, list[float]]:
    w = tf.Variable(np.full((3, 1), 0.5))

    def one(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(tf.reshape(x, [-1, 3]), w) - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    step = function(lambda xs, ys: steps(one, xs, ys))
    return step, [float(step(xs, ys)) for _ in range(2)] + w.numpy().reshape(-1).tolist()


@pytest.mark.parametrize("config", [{}, {"batch.shares": [5, 3]}, {"pipeline.micro_batches": 2}], ids=str)
@pytest.mark.parametrize("steps", [ranged, gathered, unrolled, unstacked])
def test_rows_are_divided_and_batches_are_not(ranks: Callable[..., None], steps: Any, config: dict[str, Any]) -> None:
    _, expected = trained(tf.function, steps, X, Y)
    ranks(2, **config)
    step, found = trained(wh.function, steps, X, Y)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    plan = step.plan(X, Y)
    sizes = tuple(config.get("batch.shares", (4, 4)))
    assert [(b.placement.dim, b.placement.sizes) for b in plan.batch_inputs] == [(1, sizes)] * 2
    assert "dimension 1" in plan.batch_inputs[0].origin
    assert plan.split_flops == plan.total_flops > 0


@pytest.mark.parametrize("case", ["read at once too", "one row at a time"])
def test_what_is_no_stack_has_its_rows_in_front(ranks: Callable[..., None], case: str) -> None:
    steps, xs, ys = (whole, X, Y) if case == "read at once too" else (ranged, X[:, 0], Y[:, 0, 0])
    _, expected = trained(tf.function, steps, xs, ys)
    ranks(2)
    step, found = trained(wh.function, steps, xs, ys)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert next(b.placement.dim for b in step.plan(xs, ys).batch_inputs if b.name == "xs") == 0
