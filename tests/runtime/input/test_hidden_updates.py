"""Variables that functions of a dataset change, which one rank reads: on all ranks they are as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

CANDIDATES = np.random.default_rng(1).normal(size=(10, 3))


class Retrieval:
    """Finds the best of some candidates for each row, which a dataset numbers by a variable; and counts in another."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.count, self.seen = tf.Variable(0), tf.Variable(np.zeros(3))
        self.weight = tf.Variable(np.eye(3))
        self.candidates = tf.data.Dataset.from_tensor_slices(CANDIDATES).batch(4)
        self.step = function(self.compute)

    def number(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        first = self.count.read_value()
        return tf.range(first, self.count.assign_add(tf.shape(rows)[0])), rows

    def compute(self, x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        self.count.assign(0)
        queries = x @ self.weight

        def keep_best(best: tuple[tf.Tensor, ...], one: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
            numbers, rows = one
            self.seen.assign_add(tf.reduce_sum(rows, 0))
            scores = tf.matmul(queries, rows, transpose_b=True)
            score, place = tf.reduce_max(scores, 1), tf.gather(numbers, tf.argmax(scores, 1))
            return tf.maximum(score, best[0]), tf.where(score > best[0], place, best[1])

        none = tf.zeros_like(x[:, 0]) - 9.0, tf.zeros_like(x[:, 0], tf.int32)
        scores, places = self.candidates.map(self.number).reduce(none, keep_best)
        # Each rank reads its own copy, for rows of its own.
        moved = x * self.seen * tf.cast(self.count, tf.float64)
        self.weight.assign_sub(0.001 * tf.matmul(x, moved, transpose_a=True))
        return scores, places, tf.reduce_mean(moved)


def run(function: Callable[..., Any]) -> list[np.ndarray[Any, Any]]:
    model = Retrieval(function)
    batches = [np.random.default_rng(rows).normal(size=(rows, 3)) for rows in (7, 7, 4)]
    found = [np.asarray(value) for x in batches for value in model.step(tf.constant(x))]
    return [*found, *(np.asarray(v) for v in (model.count, model.seen, model.weight))]


@pytest.mark.parametrize(
    ("count", "settings"),
    [(3, {}), (2, {"memory.zero": 2, "memory.zero_min_bytes": 0}), (4, {"mesh": wh.Mesh(a=2, b=2)})],
    ids=["replica", "zero", "mesh"],
)
def test_all_ranks_have_what_the_reader_of_a_dataset_assigned(
    ranks: Callable[..., None], count: int, settings: dict[str, Any]
) -> None:
    expected = run(tf.function)
    ranks(count, **settings)
    for value, one in zip(run(wh.function), expected, strict=True):
        np.testing.assert_allclose(value, one, rtol=0, atol=1e-12)
    wh.check_replicas()
