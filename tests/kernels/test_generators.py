"""Generators whose state ranks of one process begin to share: each rank draws what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh


def _draw(function: Any) -> list[np.ndarray]:
    generators = [tf.random.Generator.from_seed(3), *tf.random.Generator.from_seed(4).split(2)]

    def counts(generator: tf.random.Generator, rows: tf.Tensor) -> tf.Tensor:
        return generator.binomial([rows, 3], counts=5.0, probs=0.4, dtype=tf.float64)

    @function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows = tf.shape(x)[0]
        some = tf.cond(tf.reduce_sum(x) > 0, lambda: counts(generators[1], rows), lambda: tf.zeros_like(x))
        return x * counts(generators[0], rows), x * some, x * counts(generators[0], rows)

    found = [t.numpy() for rows in (9, 7, 9) for t in step(tf.constant(np.arange(rows * 3.0).reshape(rows, 3) + 1))]
    return [*found, *(generator.state.numpy() for generator in generators)]


def test_binomial_draws_of_ranks_in_one_process(ranks: Callable[..., None]) -> None:
    wanted = _draw(tf.function)
    ranks(3, **{"batch.random": "global"})
    for number, (a, b) in enumerate(zip(_draw(wh.function), wanted, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=str(number))
