"""A table of embeddings under a split scope: rows looked up by sparse ids, and once for each id."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.giant.measure import RANKS, Line, Scopes, sgd, weight

ROWS, EACH, WORDS, WIDTH = 256, 4, 20_000, 32
FLOAT = 4


class Table:
    """Sums of rows of a table, for sparse ids or for each id once (``form`` "sparse", "unique"), and a dense layer."""

    def __init__(self, scopes: Scopes, dtype: Any, form: str) -> None:
        self.scopes, self.form, self.dtype = scopes, form, dtype
        self.table = weight(0, WORDS, WIDTH, dtype=dtype)
        self.out = weight(1, WIDTH, 1, dtype=dtype)
        self.variables = [self.table, self.out]

    def batch(self, number: int) -> tuple[Any, ...]:
        return (tf.constant(np.random.default_rng(number).integers(WORDS, size=(ROWS, EACH)), tf.int32),)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.split():
                found = self.looked_up(ids)
            with self.scopes.replica():
                loss = tf.reduce_mean(tf.square(tf.reshape(found, [ROWS, -1]) @ self.out - 1))
        sgd(loss, tape, self.variables)
        return loss

    def looked_up(self, ids: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(ids, [-1])
        if self.form == "sparse":
            at = tf.stack([tf.repeat(tf.range(ROWS), EACH), tf.tile(tf.range(EACH), [ROWS])], -1)
            sparse = tf.SparseTensor(tf.cast(at, tf.int64), flat, [ROWS, EACH])
            return tf.nn.embedding_lookup_sparse(self.table, sparse, None, combiner="sum")
        once, back = tf.unique(flat)
        rows = tf.gather(tf.gather(self.table, once), back)
        return tf.reduce_sum(tf.reshape(rows, [ROWS, EACH, WIDTH]), 1)


def wanted(rows: int) -> int:
    """Ids to who has their rows, as many rows back, and their slopes there again; the rest is small."""
    return rows * (RANKS - 1) // RANKS * (FLOAT + 2 * WIDTH * FLOAT) + 2 * (RANKS - 1) * (WIDTH + 1) * FLOAT


def lines() -> list[Line]:
    """The rows about a table."""
    return [
        Line("embedding_lookup_sparse", partial(Table, form="sparse"), wanted(ROWS * EACH)),
        Line("lookup of tf.unique ids", partial(Table, form="unique"), wanted(ROWS * EACH)),
    ]
