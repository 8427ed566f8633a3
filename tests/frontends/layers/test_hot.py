"""Rows of a table that lie on every rank: the same results, what is not sent, and which rows it pays for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import Bags, zipf
from benchmarks.giant.measure import RANKS, SPREAD, Line, difference, moved_by_a_step, ranks
from tests.frontends.layers.test_embedding import LAZY, lazy
from whale.errors import ProgramError
from whale.frontends.layers.vocabulary import find_tensor
from whale.ir.layout import Shard

LIMIT = 1e-10
BATCH, EACH, WORDS, WIDTH = 16, 3, 10, 4
HOT = [7, 2, 4]


def layer_with(hot: list[int] | None) -> Any:
    layer = wh.layers.Embedding(WORDS, WIDTH, "sum", hot=hot, dtype="float64")
    layer.build()
    return layer


def rows_of(layer: Any) -> np.ndarray:
    """The table that a layer with hot rows stands for."""
    table = np.array(layer.embeddings.numpy())
    table[layer.hot_ids.numpy()] = layer.hot_rows.numpy()
    return table


def test_lookups_and_gradients_are_those_of_one_table() -> None:
    hot, plain = layer_with(HOT), layer_with(None)
    plain.embeddings.assign(rows_of(hot))
    ids = np.random.default_rng(0).integers(-1, WORDS, (BATCH, EACH))
    with tf.GradientTape(persistent=True) as tape:
        found, expected = hot(ids), plain(ids)
        losses = [tf.reduce_sum(tf.sin(y)) for y in (found, expected)]
    np.testing.assert_array_equal(found, expected)
    of_cold, of_hot = tape.gradient(losses[0], hot.trainable_variables)
    whole = tf.convert_to_tensor(tape.gradient(losses[1], plain.trainable_variables)[0]).numpy()
    mine = tf.convert_to_tensor(of_cold).numpy()
    assert not mine[np.sort(HOT)].any()
    mine[np.sort(HOT)] = of_hot
    np.testing.assert_allclose(mine, whole, atol=1e-14)


@pytest.mark.core
def test_hot_rows_are_all_reduced_and_their_ids_not_sent() -> None:
    make = partial(Bags, hot=8)
    with ranks(Line("hot", make, 0)):
        model = make(SPREAD, tf.float32)
        step = wh.function(model.step)
        plan = step.plan(*model.batch(1))
        moved = moved_by_a_step(step, model)
        sizes = sum(c.logical_bytes for c in _counters() if "sizes" in c.key) // 2
        assert moved == model.wanted(1) + sizes
    assert [p.dim for p in plan.variables.values() if isinstance(p, Shard)] == [0] * 3
    reduced = [r for r in plan.reshards if str(r.source) == "P(sum)" and r.group >= 0]
    assert len(reduced) >= 3  # of each table, with what else is summed


@LAZY
def test_adagrad_with_micro_batches() -> None:
    make = partial(Bags, hot=5, optimizer=partial(lazy, "Adagrad"), form="dense")
    assert difference(Line("hot", make, 0, 2, {"pipeline.micro_batches": 2})) <= LIMIT


def test_a_checkpoint_has_the_ids_of_its_rows_and_what_is_exported_too(tmp_path: Any) -> None:
    ids = tf.constant(np.random.default_rng(1).integers(-1, WORDS, (BATCH, EACH)))

    def saved(layer: Any) -> Any:
        return wh.CheckpointManager(tf.train.Checkpoint(layer=layer), str(tmp_path / "kept"), 1)

    def stepped(hot: list[int]) -> Any:
        layer = layer_with(hot)

        @wh.function
        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(layer(ids)))
            for v, slope in zip(layer.trainable_variables, tape.gradient(loss, layer.trainable_variables)):
                find_tensor(v).assign_sub(tf.convert_to_tensor(slope))
            return loss

        step(tf.constant(np.random.default_rng(0).integers(WORDS, size=(BATCH, EACH))))
        return layer

    with ranks(Line("hot", layer_with, 0, 3)):
        layer = stepped(HOT)
        expected = rows_of(layer)
        saved(layer).save()
    with ranks(Line("hot", layer_with, 0, 2)):
        layer = stepped([0, 1, 9])
        saved(layer).restore_or_initialize()
        np.testing.assert_array_equal(rows_of(layer), expected)
        wh.export(wh.function(lambda ids: layer(ids)), tmp_path / "served", tf.TensorSpec([BATCH, EACH], ids.dtype))
    (found,) = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"](ids).values()
    one = layer_with([5, 6, 8])
    tf.train.Checkpoint(layer=one).restore(tf.train.latest_checkpoint(str(tmp_path / "kept"))).assert_consumed()
    np.testing.assert_allclose(found, one(ids), atol=1e-14)


def test_rows_are_hot_that_more_than_two_ranks_ask_for() -> None:
    draw = np.random.default_rng(0)
    batches = [zipf(draw, 1000, 256).reshape(64, 4) for _ in range(8)]
    found = wh.layers.hot_ids(batches, RANKS)
    parts = [set(part.flat) for batch in batches for part in np.split(batch, RANKS)]
    expected = {i for i in range(1000) if sum(i in part for part in parts) > 2 * len(batches)}
    assert set(found) == expected and 0 < len(expected) < 100 and found[0] == 0
    assert wh.layers.hot_ids([np.full((4, 2), -1)], 4) == wh.layers.hot_ids(batches, 2) == []
    most_used = wh.layers.hot_ids(batches, 2, count=3)
    assert len(most_used) == 3 and set(found[:1]) <= set(most_used)
    for wrong in ([], [np.zeros((3, 2), int)], [np.zeros((4, 2))]):
        with pytest.raises(ProgramError, match="hot_ids needs"):
            wh.layers.hot_ids(wrong, 4)


def _counters() -> list[Any]:
    from whale.runtime.context import require_current

    return [c for comm in require_current("the test").comms for c in comm.counters()]
