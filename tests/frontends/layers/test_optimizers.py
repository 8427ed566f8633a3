"""Lazy optimizers: only rows with a gradient change, as a dense step would change them; over ranks as on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import SMALL_DLRM
from benchmarks.giant.measure import ALONE, SPREAD, Line, Scopes, difference, moved_by_a_step, ranks, weight
from tests.draws import one_of
from whale.errors import ProgramError
from whale.ir.layout import Shard

KERAS_3 = tf.__version__ >= "2.16"
pytestmark = pytest.mark.skipif(not KERAS_3, reason="lazy optimizers are those of Keras 3")
LIMIT = 1e-10
BATCH, EACH, WORDS, WIDTH = 16, 3, 40, 8
MAKE: dict[str, Callable[[], Any]] = {
    "adam": lambda: tf.keras.optimizers.Adam(0.05, epsilon=1e-3),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.05),
    "ftrl": lambda: tf.keras.optimizers.Ftrl(0.05, l1_regularization_strength=1e-3),
    "rmsprop": lambda: tf.keras.optimizers.RMSprop(0.05),
    "row-wise": lambda: wh.optimizers.RowWiseAdagrad(0.05),
}


class Trained:
    """Rows of a table, each id once or every one, a dense layer, and an optimizer of both."""

    def __init__(self, scopes: Scopes, dtype: Any, optimizer: str, once: bool = False) -> None:
        self.scopes, self.once = scopes, once
        self.table, self.out = weight(0, WORDS, WIDTH, dtype=dtype), weight(1, EACH * WIDTH, 1, dtype=dtype)
        before = tf.keras.backend.floatx()
        tf.keras.backend.set_floatx(dtype.name)  # of the optimizer's variables
        self.optimizer = wh.optimizers.lazy(MAKE[optimizer]())
        self.optimizer.build([self.table, self.out])
        tf.keras.backend.set_floatx(before)
        state = [v.value for v in self.optimizer.variables if v.shape]
        self.variables = [self.table, self.out, *state]

    def batch(self, number: int) -> tuple[Any, ...]:
        ids = np.random.default_rng(number).zipf(1.5, (BATCH, EACH)) % WORDS
        return (tf.constant(ids, tf.int32),)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.split():
                each, back = tf.unique(tf.reshape(ids, [-1])) if self.once else (ids, None)
                rows = tf.gather(self.table, each)
                rows = rows if back is None else tf.gather(rows, back)
            with self.scopes.replica():
                loss = tf.reduce_mean(tf.square(tf.tanh(tf.reshape(rows, [BATCH, -1])) @ self.out - 1))
        self.optimizer.apply(tape.gradient(loss, [self.table, self.out]), [self.table, self.out])
        return loss


@pytest.mark.parametrize("name, once", [("adam", True), ("ftrl", False), ("row-wise", False)])
def test_over_ranks_as_on_one_device(name: str, once: bool) -> None:
    line = Line(name, partial(Trained, optimizer=name, once=once), 0, 2)
    with ranks(line):
        model = line.make(SPREAD, tf.float64)
        plan = wh.function(model.step).plan(*model.batch(0))
        cut = [p.dim for p in plan.variables.values() if isinstance(p, Shard)]
        # Rows go to their columns, though only the run knows how many ids there are once: no sum over the ranks.
        assert not any("UnsortedSegmentSum" in r.ref.node for r in plan.reshards)
        # The table and its moments by columns, which is cheaper; a sum for each row has none, and means the table's.
        assert cut == {"adam": [1] * 3, "ftrl": [1] * 3, "row-wise": [0] * 2}[name]
    assert difference(line) <= LIMIT


@pytest.mark.parametrize("name", MAKE)
def test_rows_with_a_gradient_are_stepped_and_no_others(name: str) -> None:
    """One dense step from the beginning is the same, for rows that have a gradient."""
    ids, slopes = [3, 1, 3], np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    start = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    dense = np.zeros((6, 4), np.float32)
    np.add.at(dense, ids, slopes)
    found = []
    for gradient in (tf.IndexedSlices(tf.constant(slopes), tf.constant(ids)), tf.constant(dense)):
        table = tf.Variable(start)
        wh.optimizers.lazy(MAKE[name]()).apply([gradient], [table])
        found.append(table.numpy())
    np.testing.assert_allclose(found[0][[1, 3]], found[1][[1, 3]], rtol=1e-6)
    np.testing.assert_array_equal(found[0][[0, 2, 4, 5]], start[[0, 2, 4, 5]])


def test_what_changes_every_row_is_refused() -> None:
    with pytest.raises(ProgramError, match="changes every row") as caught:
        wh.optimizers.lazy(tf.keras.optimizers.AdamW())
    assert "weight_decay" in str(caught.value)
    with pytest.raises(ProgramError, match="only optimizers of Keras 3"):
        wh.optimizers.lazy(object())


@pytest.mark.parametrize(
    "name, count, config",
    one_of(
        2,
        [
            ("Adam", 4, {}),
            ("Ftrl", 3, {"batch.shares": [2, 1, 1]}),
            ("RowWiseAdagrad", 2, {"pipeline.micro_batches": 2}),
            ("Adagrad", 2, {"memory.zero": 1}),
        ],
        several=True,
    ),
)
def test_tables_by_rows_are_stepped_where_their_rows_are(name: str, count: int, config: dict[str, Any]) -> None:
    make = partial(SMALL_DLRM, tables=2, optimizer=name)
    line = Line(name, make, 0, count, config)
    with ranks(line):
        model = make(SPREAD, tf.float64)
        plan = wh.function(model.step).plan(*model.batch(0))
        of_rows = [p for v, p in plan.variables.items() if "lookup" in v or "/Gather" in v]
        states = {"Adam": 2, "Ftrl": 2, "RowWiseAdagrad": 1, "Adagrad": 1}[name]
        assert [p.dim for p in of_rows if isinstance(p, Shard)] == [0] * len(model.tables) * (1 + states)
        kinds = Counter(name.split("/")[-1].partition("_")[0] for name in plan.routed)
        assert kinds == {"embedding": 2, "UnsortedSegmentSum": 2}
    assert difference(line) <= LIMIT


def test_a_number_for_each_row_is_whole_where_tables_lie_by_columns() -> None:
    """No scope, so ids are those of the whole batch: its sums have no columns to be sharded by."""

    def make(scopes: Scopes, dtype: Any) -> Any:
        return SMALL_DLRM(ALONE, dtype, tables=2, optimizer="RowWiseAdagrad")

    line = Line("no scope", make, 0, 2, {"memory.zero": 3, "memory.zero_min_bytes": 0})
    with ranks(line):
        model = make(SPREAD, tf.float64)
        plan = wh.function(model.step).plan(*model.batch(0))
        assert [p.dim for v, p in plan.variables.items() if "lookup" in v and isinstance(p, Shard)] == [1, 1]
    assert difference(line) <= LIMIT


def test_rows_of_a_lazy_optimizer_travel_once() -> None:
    make = partial(SMALL_DLRM, tables=2, optimizer="Adam")
    with ranks(Line("Adam", make, 0)):
        model = make(SPREAD, tf.float32)
        numbers = 4 * 3 * 2 * 8  # how many ids go from each rank to each other one, of each table
        assert moved_by_a_step(wh.function(model.step), model) == model.wanted(1) + numbers
