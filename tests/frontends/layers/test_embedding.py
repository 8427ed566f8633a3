"""``wh.layers.Embedding`` against its definition on one device, and over ranks against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import Bags
from benchmarks.giant.measure import SPREAD, Line, difference, ranks
from tests.draws import one_of
from whale.errors import ProgramError
from whale.ir.layout import Shard
from whale.runtime.context import require_current

KERAS_3 = tf.__version__ >= "2.16"
LIMIT = 1e-10
BATCH, EACH, WORDS, WIDTH = 5, 3, 10, 4


LAZY = pytest.mark.skipif(not KERAS_3, reason="lazy optimizers are those of Keras 3")


def lazy(name: str = "Adam") -> Any:
    before = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx("float64")  # of its variables
    optimizer = wh.optimizers.lazy(getattr(tf.keras.optimizers, name)(0.05, epsilon=1e-3))
    tf.keras.backend.set_floatx(before)
    return optimizer


def made(**options: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """A layer, its table, ids of which some are absent, and weights."""
    layer = wh.layers.Embedding(WORDS, WIDTH, **options, dtype="float64")
    layer.build()
    random = np.random.default_rng(0)
    table = random.normal(size=(WORDS, WIDTH))
    layer.embeddings.assign(table)
    ids = random.integers(WORDS, size=(BATCH, EACH))
    ids[np.arange(EACH) >= random.integers(0, EACH + 1, (BATCH, 1))] = -1
    ids[0] = -1
    return layer, table, ids, random.random((BATCH, EACH))


def formed(form: str, values: np.ndarray, present: np.ndarray) -> Any:
    if form == "ragged":
        return tf.RaggedTensor.from_row_lengths(values[present], present.sum(1))
    if form == "sparse":
        return tf.SparseTensor(np.argwhere(present), values[present], values.shape)
    return tf.constant(values)


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_those_of_embedding_lookup_sparse(form: str, combiner: str, weighted: bool) -> None:
    layer, table, ids, weights = made(combiner=combiner, max_ids=EACH)
    present = ids >= 0
    inputs = [formed(form, ids, present), *([formed(form, weights, present)] if weighted else [])]
    found = np.asarray(layer(*inputs))
    w = np.where(present, weights if weighted else 1.0, 0.0)
    expected = np.einsum("bk,bkw->bw", w, table[ids])
    over = {"sum": np.ones(BATCH), "mean": w.sum(1), "sqrtn": np.sqrt((w * w).sum(1))}[combiner]
    expected = np.where(over[:, None] > 0, expected / np.where(over > 0, over, 1)[:, None], 0.0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_each_id_has_a_row_without_a_combiner() -> None:
    layer, table, ids, _ = made()
    np.testing.assert_array_equal(layer(np.abs(ids)), table[np.abs(ids)])
    np.testing.assert_array_equal(layer(tf.abs(ids)[:, 0]), table[np.abs(ids)[:, 0]])


def test_absent_ids_touch_no_row_but_their_bags() -> None:
    """A lazy optimizer steps each row that has a gradient, be it zero."""
    layer, _, _, _ = made(combiner="sum")
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(tf.constant([[7, -1, -1], [-1, 3, -1]])))
    gradient = tape.gradient(y, layer.trainable_variables)[0]
    assert set(gradient.indices.numpy()) == {7, 3}


@pytest.mark.parametrize(
    "count, config, form",
    one_of(2, [
        (2, {}, {"form": "ragged", "combiner": "sqrtn", "weighted": True}),
        (3, {"batch.shares": [2, 1, 1]}, {"combiner": "sum"}),
        (2, {"pipeline.micro_batches": 2}, {"form": "dense", "weighted": True}),
        (2, {}, {"combiner": None, "sharded": None}),
        (2, {}, {"form": "sparse", "sharded": "columns"}),
        (2, {}, {"sharded": "whole"}),
        (3, {"batch.shares": [2, 1, 1]}, {"hot": 5, "weighted": True}),
        pytest.param(
            2, {}, {"weighted": True, "optimizer": lazy}, marks=LAZY,
        ),
    ], several=True),
)  # fmt: skip
def test_over_ranks_as_on_one_device(count: int, config: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    assert difference(Line("bags", partial(Bags, **form), 0, count, config)) <= LIMIT


def moved(make: Callable[..., Any]) -> tuple[set[Any], set[str]]:
    """How tables lie, and the exchanges of a step, by the last words of their keys."""
    with ranks(Line("bags", make, 0, 2)):
        model = make(SPREAD, tf.float32)
        step = wh.function(model.step)
        plan = step.plan(*model.batch(1))
        step(*model.batch(1))
        keys = {c.key for comm in require_current("the test").comms for c in comm.counters() if "check" not in c.key}
    cut = {p.dim for p in plan.variables.values() if isinstance(p, Shard)}
    return cut, {key.split("/")[-1].split("_")[0] for key in keys if "group" not in key}


def test_tables_lie_as_asked_and_those_by_rows_travel_together() -> None:
    assert moved(Bags) == ({0}, {"sizes", "ids", "rows", "sums"})
    assert moved(partial(Bags, sharded="columns"))[0] == {1}
    assert moved(partial(Bags, sharded="whole"))[0] == set()


def test_models_have_it_and_make_it_again() -> None:
    ids, weights = tf.keras.Input((EACH,), dtype="int64"), tf.keras.Input((EACH,))
    bag = wh.layers.Embedding(WORDS, WIDTH, "mean", name="bag")(ids, weights)
    model = tf.keras.Model([ids, weights], tf.keras.layers.Dense(1)(bag))
    assert model.layers[-2].output.shape[-1] == WIDTH
    model.compile("sgd", "mse")
    random = np.random.default_rng(0)
    x = [random.integers(-1, WORDS, (BATCH, EACH)), random.random((BATCH, EACH)).astype(np.float32)]
    model.fit(x, np.ones(BATCH), verbose=0)
    again = tf.keras.Model.from_config(model.get_config(), custom_objects={"Embedding": wh.layers.Embedding})
    again.set_weights(model.get_weights())
    np.testing.assert_allclose(again(x), model(x))


@pytest.mark.parametrize(
    "options",
    [
        {"combiner": "max"},
        {"sharded": "both"},
        {"hot": WORDS},
        {"hot": [3, 3]},
        {"hot": [WORDS]},
        {"hot": 2, "dynamic": True},
        {"hot": 2, "sharded": "columns"},
    ],
)
def test_what_is_no_table_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="Embedding does not accept th"):
        made(**options)


def test_inputs_that_fit_no_table_are_refused() -> None:
    ragged = tf.ragged.constant([[1, 2, 3], [4]])
    with pytest.raises(ProgramError, match="Embedding does not accept th"):
        made(combiner="sum")[0](ragged)
    with pytest.raises(ProgramError, match="Embedding does not accept th"):
        made()[0](np.zeros((2, 2), int), np.ones((2, 2)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="more ids than max_ids"):
        made(combiner="sum", max_ids=2)[0](ragged)
