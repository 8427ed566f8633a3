"""Tables of embeddings under a split scope: rows by sparse ids, and once for each id; a DLRM of many tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import ALONE, RANKS, Line, Scopes, sgd, weight
from whale.frontends.layers.vocabulary import find_tensor
from whale.ir.layout import divide_evenly

ROWS, EACH, WORDS, WIDTH = 256, 4, 20_000, 32
TABLES, DENSE = 26, 13
FLOAT = 4
# Those that change only rows with a gradient.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: wh.optimizers.lazy(tf.keras.optimizers.SGD(0.05)),
    "Adagrad": lambda: wh.optimizers.lazy(tf.keras.optimizers.Adagrad(0.05)),
    "Adam": lambda: wh.optimizers.lazy(tf.keras.optimizers.Adam(0.01)),
    "Ftrl": lambda: wh.optimizers.lazy(tf.keras.optimizers.Ftrl(0.05)),
    "RowWiseAdagrad": lambda: wh.optimizers.RowWiseAdagrad(0.05),
}


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


class Dlrm:
    """A recommender: a row of each table for each example, dense features, their products by pairs.

    Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019. Ids follow
    Zipf's law, as clicks do: few rows are wanted by most examples.
    """

    def __init__(
        self,
        scopes: Scopes,
        dtype: Any,
        batch: int,
        rows: int,
        tables: int = TABLES,
        width: int = 16,
        optimizer: str = "",
    ) -> None:
        self.scopes, self.dtype, self.rows, self.size = scopes, dtype, batch, width
        self.words = [max(8, rows >> (i % 8)) for i in range(tables)]
        with scopes.split(dim=0):  # no rank makes a whole table
            self.tables = [self._table(i, n) for i, n in enumerate(self.words)]
        pairs = (tables + 1) * tables // 2
        sizes = [(DENSE, 64), (64, width), (width + pairs, 64), (64, 1)]
        self.dense = [weight(100 + i, *shape, dtype=dtype) for i, shape in enumerate(sizes)]
        self.variables = [*self.tables, *self.dense]
        self.optimizer = OPTIMIZERS[optimizer]() if optimizer else None
        if self.optimizer is not None:
            self.optimizer.build(self.variables)

    def _table(self, number: int, words: int) -> tf.Variable:
        shape, seed = [words, self.size], [number, 1]
        return tf.Variable(lambda: 0.1 * tf.random.stateless_normal(shape, seed, dtype=self.dtype))

    def batch(self, number: int, part: int = 1) -> tuple[Any, ...]:
        """The operands of a step; of each table one row of so many, all over it, has examples."""
        draw = np.random.default_rng(number)
        ids = np.stack([part * zipf(draw, max(1, n // part), self.rows) for n in self.words], 1)
        return tf.constant(ids, tf.int32), tf.constant(draw.standard_normal((self.rows, DENSE)), self.dtype)

    def step(self, ids: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.split(dim=0):
                found = [tf.nn.embedding_lookup(table, ids[:, i]) for i, table in enumerate(self.tables)]
            with self.scopes.replica():
                bottom, narrow, top, out = self.dense
                seen = tf.nn.relu(tf.nn.relu(features @ bottom) @ narrow)
                every = tf.stack([seen, *found], 1)
                products = tf.matmul(every, every, transpose_b=True)
                count = len(found) + 1
                pairs = [products[:, i, :i] for i in range(1, count)]
                logits = tf.nn.relu(tf.concat([seen, *pairs], 1) @ top) @ out
                loss = tf.reduce_mean(tf.square(logits - 1))
        if self.optimizer is None:
            sgd(loss, tape, self.variables)
        else:
            self.optimizer.apply(tape.gradient(loss, self.variables), self.variables)
        return loss

    def wanted(self, number: int) -> int:
        """Each rank asks once for an id that another one has: id, row, its slope; and the dense weights' sums."""
        ids = self.batch(number)[0].numpy()
        asked = sum(asked_for(column, words) for column, words in zip(ids.T, self.words))
        dense = sum(int(np.prod(v.shape)) for v in self.dense) + 1
        return asked * (FLOAT + 2 * self.size * FLOAT) + 2 * (RANKS - 1) * dense * FLOAT


class Bags:
    """``wh.layers.Embedding``: a bag of ids of each table for each example, and a dense layer.

    Args:
      form: of the ids: "dense", "ragged", "sparse".
      optimizer: made when the variables are; None: plain gradient descent.
      folder: where tables lie in files.
      dynamic: ids are any numbers, and ``words`` the slots; `slots` has who has which.
      hot: how many of the first rows lie on every rank; 0: the table has no such rows.
    """

    def __init__(
        self, scopes: Scopes, dtype: Any, form: str = "dense", combiner: str | None = "mean", weighted: bool = False,
        sharded: str | None = "rows", optimizer: Callable[[], Any] | None = None, tables: int = 3, words: int = 40,
        width: int = 8, batch: int = 16, each: int = 3, dynamic: bool = False, evict: str = "lru",
        folder: str | None = None, hot: int = 0,
    ) -> None:  # fmt: skip
        self.hot = hot
        self.form, self.combiner, self.weighted, self.words, self.dynamic = form, combiner, weighted, words, dynamic
        self.rows, self.each, self.width = batch, each, width
        self.layers = [
            wh.layers.Embedding(
                words,
                width,
                combiner,
                max_ids=each,
                sharded=sharded,
                dtype=dtype.name,
                dynamic=dynamic,
                evict=evict,
                folder=folder,
                hot=hot or None,
            )
            for _ in range(tables)
        ]
        for i, layer in enumerate(self.layers):
            layer.build()
            layer.embeddings.assign(weight(i, *layer.embeddings.shape, dtype=dtype))
            if hot:
                layer.hot_rows.assign(weight(i, hot, width, dtype=dtype))
        self.out = weight(9, width * tables * (1 if combiner else each), 1, dtype=dtype)
        self.trained = [*(v for layer in self.layers for v in layer.trainable_weights), self.out]
        self.optimizer = None if optimizer is None else optimizer()
        self.variables = [find_tensor(v) for v in self.trained]
        self.slots = [find_tensor(v) for layer in self.layers for v in layer.non_trainable_weights]

    def batch(self, number: int) -> tuple[Any, ...]:
        draw, found = np.random.default_rng(number), list[Any]()
        for _ in self.layers:
            ids = zipf(draw, self.words * 9**self.dynamic, self.rows * self.each).reshape(self.rows, self.each)
            ids = ids * 7919 + (1 << 40) if self.dynamic else ids
            present = np.arange(self.each) < draw.integers(0, self.each + 1, (self.rows, 1))
            weights = draw.random((self.rows, self.each))
            if self.combiner is None:
                present[:] = True
            found.append(self._formed(np.where(present, ids, -1), present))
            if self.weighted:
                found.append(self._formed(weights, present))
        return tuple(found)

    def _formed(self, values: np.ndarray, present: np.ndarray) -> Any:
        if self.form == "ragged":
            return tf.RaggedTensor.from_row_lengths(tf.constant(values[present]), present.sum(1))
        if self.form == "sparse":
            return tf.SparseTensor(np.argwhere(present), values[present], values.shape)
        return tf.constant(values)

    def step(self, *inputs: Any) -> tf.Tensor:
        each = 2 if self.weighted else 1
        with tf.GradientTape() as tape:
            batches = [inputs[i * each : (i + 1) * each] for i in range(len(self.layers))]
            found = [layer(*batch, training=True) for layer, batch in zip(self.layers, batches)]
            hidden = tf.reshape(tf.concat(found, -1), [self.rows, -1])
            loss = tf.reduce_mean(tf.square(tf.tanh(hidden @ self.out) - 1))
        if self.optimizer is None:
            sgd(loss, tape, self.variables)
        else:
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trained), self.trained))
        return loss

    def wanted(self, number: int) -> int:
        """As of ``Dlrm``; ids are int64, absent ones are others of their bags, and one stands for all hot ones."""
        asked = 0
        for ids in self.batch(number):
            bags = ids.numpy()
            filled = np.where(bags < 0, np.maximum(bags.max(1, keepdims=True), 0), bags)
            asked += asked_for(np.where(filled < self.hot, 0, filled).reshape(-1), self.words)
        dense = int(np.prod(self.out.shape)) + 1 + len(self.layers) * self.hot * self.width
        return asked * (8 + 2 * self.width * FLOAT) + 2 * (RANKS - 1) * dense * FLOAT


class Whole(Bags):
    """The same, each table whole on one rank, as cost says: bags are added up there."""

    def __init__(self, scopes: Scopes, dtype: Any, **form: Any) -> None:
        super().__init__(scopes, dtype, sharded=None, **form)

    def wanted(self, number: int) -> int:
        """Ids, who of them is there, and the weights go to tables; a row of each bag, and its slope, go between."""
        ids = sum(int(np.prod(one.shape)) * 9 for one in self.batch(number))
        rows = 2 * len(self.layers) * self.rows * self.width * FLOAT
        dense = int(np.prod(self.out.shape)) + 1
        return (ids + rows) * (RANKS - 1) // RANKS + 2 * (RANKS - 1) * dense * FLOAT


def asked_for(ids: np.ndarray, words: int) -> int:
    """How many rows all ranks together ask others for, each once."""
    ends, asked = np.cumsum(divide_evenly(words, RANKS)), 0
    for rank, part in enumerate(np.split(ids, RANKS)):
        asked += int((np.searchsorted(ends, np.unique(part), side="right") != rank).sum())
    return asked


def zipf(draw: np.random.Generator, words: int, count: int, exponent: float = 1.05) -> np.ndarray:
    """Numbers below ``words``, of which the first is drawn most often."""
    weights = _cumulated(words, exponent)
    return np.searchsorted(weights, draw.random(count) * weights[-1])


@cache
def _cumulated(words: int, exponent: float) -> np.ndarray:
    return np.cumsum(np.arange(1, words + 1, dtype=np.float64) ** -exponent)


def wanted(rows: int) -> int:
    """Ids to who has their rows, as many rows back, and their slopes there again; the rest is small."""
    return rows * (RANKS - 1) // RANKS * (FLOAT + 2 * WIDTH * FLOAT) + 2 * (RANKS - 1) * (WIDTH + 1) * FLOAT


LARGE_BAGS = partial(Bags, tables=8, words=50_000, width=16, batch=1024, each=8)
SMALL_DLRM = partial(Dlrm, batch=32, rows=200, tables=6, width=8)


def lines() -> list[Line]:
    """The rows about a table."""
    dlrm = partial(Dlrm, batch=4096, rows=100_000)
    one = partial(Whole, tables=8, words=50_000, width=16, batch=1024, each=8)
    hot, few = partial(LARGE_BAGS, hot=64), partial(Bags, hot=5)
    return [
        Line("DLRM, 26 tables, Zipf 1.05, batch 4,096", dlrm, dlrm(ALONE, tf.float32).wanted(1), small=SMALL_DLRM),
        Line("wh.layers.Embedding, 8 tables of bags", LARGE_BAGS, LARGE_BAGS(ALONE, tf.float32).wanted(1), small=Bags),
        Line("wh.layers.Embedding, 8 tables of bags, 64 hot rows", hot, hot(ALONE, tf.float32).wanted(1), small=few),
        Line("wh.layers.Embedding, 8 tables of bags, a rank each", one, one(ALONE, tf.float32).wanted(1), small=Whole),
        Line("embedding_lookup_sparse", partial(Table, form="sparse"), wanted(ROWS * EACH)),
        Line("lookup of tf.unique ids", partial(Table, form="unique"), wanted(ROWS * EACH)),
    ]
