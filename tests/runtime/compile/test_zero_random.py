"""ZeRO draws what one device draws: a random tensor stays whole, though only parts of it are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

X = np.random.default_rng(0).normal(size=(8, 6))


def _train(function: Callable[..., Any]) -> list[np.ndarray]:
    weights = [tf.Variable(np.ones([6, 4]) / 3), tf.Variable(np.ones([4, 1]))]
    moving = [tf.Variable(np.zeros(w.shape)) for w in weights]
    count = tf.Variable(0)

    @function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.nn.experimental.stateless_dropout(tf.tanh(x @ weights[0]), 0.4, [1, count.assign_add(1)])
            other = tf.nn.experimental.stateless_dropout(tf.tanh(2 * x @ weights[0]), 0.4, [2, count])
            loss = tf.reduce_mean(hidden @ weights[1]) + tf.reduce_mean((other @ weights[1]) ** 2)
        gradients = tape.gradient(loss, weights)
        for i, (weight, slot, gradient) in enumerate(zip(weights, moving, gradients)):
            noise = tf.random.stateless_normal(weight.shape, [3 + i, count], dtype=tf.float64)
            slot.assign(0.9 * slot + gradient + 0.1 * noise)  # as in training with differential privacy
            weight.assign_sub(0.1 * slot)
        return loss

    losses = [np.array(step(tf.constant(X))) for _ in range(3)]
    return [*losses, *(w.numpy() for w in weights)]


@pytest.mark.parametrize("level", [1, 3])
def test_noise_of_split_state_is_one_devices(ranks: Callable[..., None], level: int) -> None:
    wanted = _train(tf.function)
    ranks(2, **{"batch.random": "global", "memory.zero": level, "memory.zero_min_bytes": 0})
    for one, other in zip(_train(wh.function), wanted):
        np.testing.assert_allclose(one, other, rtol=1e-10)
