"""Tables that lie by rows, of which each rank gets those of its ids: equal to one device, however they are spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import SMALL_DLRM
from benchmarks.giant.measure import SPREAD, Line, Scopes, difference, ranks, sgd, weight
from whale.errors import WhaleError
from whale.ir.ops import SCATTER_ROWS
from whale.runtime.context import require_current

LIMIT = 1e-10
BATCH, EACH, WORDS, WIDTH = 16, 3, 40, 8


class Embedded:
    """Rows of a table by ids of two dimensions, and dense layers, in one stage or two."""

    def __init__(self, scopes: Scopes, dtype: Any, staged: bool = False, micro_batches: int = 1) -> None:
        self.scopes, self.staged, self.micro_batches = scopes, staged, micro_batches
        self.table, self.into = weight(0, WORDS, WIDTH, dtype=dtype), weight(1, EACH * WIDTH, 64, dtype=dtype)
        self.out = weight(2, 64, 1, dtype=dtype)
        self.variables = [self.table, self.into, self.out]

    def batch(self, number: int) -> tuple[Any, ...]:
        ids = np.random.default_rng(number).zipf(1.5, (BATCH, EACH)) % WORDS
        return (tf.constant(ids, tf.int32),)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        microbatched = (
            self.scopes.pipeline(num_micro_batch=self.micro_batches) if self.micro_batches > 1 else nullcontext()
        )
        with tf.GradientTape() as tape, microbatched:
            with self.stage():
                with self.scopes.split(dim=0):
                    rows = tf.nn.embedding_lookup(self.table, ids)
                with nullcontext() if self.staged else self.scopes.replica():
                    h = tf.nn.relu(tf.reshape(rows, [BATCH, -1]) @ self.into)
            with self.stage(), nullcontext() if self.staged else self.scopes.replica():
                loss = tf.reduce_mean(tf.square(h @ self.out - 1))
        sgd(loss, tape, self.variables)
        return loss

    def stage(self) -> Any:
        return self.scopes.stage() if self.staged else nullcontext()


@pytest.mark.parametrize(
    "count, config, form",
    [
        (3, {"batch.shares": [2, 1, 1]}, {}),
        (4, {"pipeline.micro_batches": 2}, {}),
        (4, {}, {"staged": True, "micro_batches": 2}),
        (2, {"memory.zero": 1}, {}),
    ],
)
def test_however_a_step_is_spread(count: int, config: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    line = Line("rows", partial(Embedded, **form), 0, count, config)
    with ranks(line):
        model = line.make(SPREAD, tf.float64)
        plan = wh.function(model.step).plan(*model.batch(0))
        assert [name.split("/")[-1] for name in plan.routed] == ["embedding_lookup", "ResourceScatterSub"]
    assert difference(line) <= LIMIT


class Replicated:
    """Rows of three tables that every rank has whole, read as Keras 3 does: by the value."""

    def __init__(self, scopes: Scopes, dtype: Any) -> None:
        self.scopes = scopes
        self.tables = [weight(number, WORDS, WIDTH, dtype=dtype) for number in range(3)]
        self.out = weight(3, 3 * EACH * WIDTH, 1, dtype=dtype)
        self.variables = [*self.tables, self.out]

    def batch(self, number: int) -> tuple[Any, ...]:
        ids = np.random.default_rng(number).zipf(1.5, (BATCH, 3, EACH)) % WORDS
        return (tf.constant(ids, tf.int32),)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, self.scopes.replica():
            rows = [tf.gather(tf.convert_to_tensor(table), ids[:, i]) for i, table in enumerate(self.tables)]
            h = tf.reshape(tf.concat(rows, 1), [BATCH, -1])
            loss = tf.reduce_mean(tf.square(tf.nn.relu(h) @ self.out - 1))
        sgd(loss, tape, self.variables)
        return loss


@pytest.mark.parametrize("shares", [(), (3, 1)])
def test_gradients_of_rows_are_gathered_once(shares: tuple[int, ...]) -> None:
    """Two exchanges for all tables, one of ids and one of rows, and no table is read whole."""
    line = Line("replicated", Replicated, 0, 2, {"batch.shares": list(shares)})
    with ranks(line):
        model = line.make(SPREAD, tf.float64)
        program = wh.function(model.step)._step(model.batch(0), {}).compiled.ranks[0]
        ops = Counter(node.op for node in program.nodes)
        read = {program.variable_of[n.inputs[0].node].type.shape for n in program.nodes if n.op == "ReadVariableOp"}
        assert ops["WhaleAllGather"] == 2 and ops[SCATTER_ROWS] == 1 and (WORDS, WIDTH) not in read
    assert difference(line) <= LIMIT


def test_tables_travel_together_and_no_row_twice() -> None:
    line = Line("tables", SMALL_DLRM, 0)
    assert difference(line) <= LIMIT
    with ranks(line):
        model = SMALL_DLRM(SPREAD, tf.float32)
        step = wh.function(model.step)
        step(*model.batch(1))
        moved: dict[str, int] = {}
        for comm in require_current("the test").comms:
            for c in comm.counters():
                if "check" not in c.key:
                    moved[c.key] = moved.get(c.key, 0) + c.logical_bytes
    exchanged = {key.split("/")[-1].split("_")[0] for key in moved if "AllReduce" not in key and "group" not in key}
    # Numbers of ids, the ids, their rows; and sums: once each, for six tables.
    assert exchanged == {"sizes", "ids", "rows", "sums"} and len(moved) == 5
    small = 4 * 3 * 6 * 8  # the numbers of ids
    assert sum(moved.values()) == model.wanted(1) + small


def test_an_id_that_no_row_has() -> None:
    line = Line("rows", Embedded, 0, 2)
    with ranks(line):
        model = Embedded(SPREAD, tf.float32)
        with pytest.raises((WhaleError, tf.errors.InvalidArgumentError), match=r"= 40 is not in \[0, 40\)"):
            wh.function(model.step)(tf.fill([BATCH, EACH], WORDS))


def test_a_model_is_read_by_another_number_of_ranks(tmp_path: Any) -> None:
    line = Line("rows", Embedded, 0, 4)
    with ranks(line):
        model = Embedded(SPREAD, tf.float64)
        wh.function(model.step)(*model.batch(0))
        wh.CheckpointManager(tf.train.Checkpoint(table=model.table), str(tmp_path), 1).save()
        expected = model.table.numpy()
    with ranks(Line("rows", Embedded, 0, 3)):
        model = Embedded(SPREAD, tf.float64)
        wh.function(model.step)(*model.batch(1))
        wh.CheckpointManager(tf.train.Checkpoint(table=model.table), str(tmp_path), 1).restore_or_initialize()
        np.testing.assert_array_equal(model.table.numpy(), expected)
