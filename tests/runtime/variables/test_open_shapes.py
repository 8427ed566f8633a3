"""Variables whose shape is open, so that values of other sizes can be assigned, in steps and by the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

X = np.random.default_rng(5).normal(size=(20, 3))


def trained(function: Callable[..., Any]) -> list[np.ndarray]:
    """Returns what steps return, and variables to which the script assigns more and fewer rows between them."""
    weight = tf.Variable(np.ones((4, 3)), shape=tf.TensorShape([None, 3]))
    seen = tf.Variable(np.zeros((0, 3)), shape=tf.TensorShape([None, 3]), trainable=False)
    sums = tf.Variable(np.zeros(()), shape=tf.TensorShape(None), trainable=False)

    @function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ tf.transpose(weight)) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        seen.assign(tf.concat([seen, x], 0)[-9:])
        sums.assign(tf.reduce_sum(seen.read_value(), 1))
        return loss

    losses = [step(X[:6]), step(X[6:11])]
    seen.assign(seen[:2])
    sums.assign([[1.0]])
    weight.assign(tf.concat([weight, weight[:1]], 0))
    losses.append(step(X[11:17]))
    weight.assign(weight[:2])
    losses.append(step(X[17:]))
    return [np.array(losses), *(v.numpy() for v in (weight, seen, sums))]


@pytest.mark.parametrize("zero", [0, 3])
def test_values_of_other_sizes_equal_one_device(ranks: Callable[..., None], zero: int) -> None:
    expected = trained(tf.function)
    ranks(3, **{"memory.zero": zero, "memory.zero_min_bytes": 0})
    for found, wanted in zip(trained(wh.function), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)
