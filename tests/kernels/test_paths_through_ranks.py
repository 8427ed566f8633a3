"""Steps that update a weight and go on with it: a rank without rows reads nothing of what other ranks then compute.

Its own program does not show that a later gradient depends on an earlier update, through the other ranks. An operation
that waited for both, or an update that waited for a reader behind such a path, would wait for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.kernels.updates import LARGE_BYTES

ROWS, LAYERS = 8, 3


def _train(function: Callable[..., Any], width: int, rows: int, old_values: bool) -> list[np.ndarray]:
    """Trains layer by layer in each step: losses, and the weights afterwards.

    Args:
      old_values: later layers read what the weights of earlier ones were before.
    """
    draw = np.random.default_rng(0)
    weights = [tf.Variable(draw.normal(size=(width, width)) / width**0.5) for _ in range(LAYERS)]

    @function
    def step(h: tf.Tensor) -> tf.Tensor:
        total, old = tf.constant(0.0, tf.float64), []
        for weight in weights:
            if old_values:
                old.append(weight.read_value())
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((h @ weight) ** 2)
            # No arithmetic on elements, so that the update does not take the gradient from an exchange itself.
            weight.assign_sub(0.05 * tf.sort(tape.gradient(loss, weight), 1))
            h = tf.tanh(tf.add_n([h @ weight, *(h @ before for before in old)]))
            total += loss
        return total

    losses = [step(tf.constant(draw.normal(size=(rows, width)))).numpy() for _ in range(2)]
    return [*losses, *(tf.convert_to_tensor(weight).numpy() for weight in weights)]


SHARES = [(2, ROWS, (0, 8)), (2, ROWS, (8, 0)), (3, ROWS, (0, 8, 0)), (3, ROWS, (3, 0, 5)), (2, 1, ())]


@pytest.mark.parametrize("count, rows, shares", one_of(4, SHARES, several=True))
def test_updates_one_of_which_waits_for_another_through_other_ranks_are_apart(
    ranks: Callable[..., None], count: int, rows: int, shares: tuple[int, ...]
) -> None:
    wanted = _train(tf.function, 4, rows, False)
    ranks(count, **{"memory.zero": 3, "memory.zero_min_bytes": 0, "batch.shares": shares, "mesh.plan_cache": ""})
    for one, other in zip(_train(wh.function, 4, rows, False), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shares", one_of(2, [(8, 0), (0, 8)]))
def test_an_update_waits_for_no_reader_that_waits_for_it_through_other_ranks(
    ranks: Callable[..., None], shares: tuple[int, ...]
) -> None:
    width = 512
    assert width * width * 8 // 2 >= LARGE_BYTES  # on each of two ranks
    wanted = _train(tf.function, width, ROWS, True)
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0, "batch.shares": shares, "mesh.plan_cache": ""})
    for one, other in zip(_train(wh.function, width, ROWS, True), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
