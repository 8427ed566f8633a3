"""Dynamic tables: which id has which slot, against a dictionary, and over ranks against one device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import Bags
from benchmarks.giant.measure import ALONE, SPREAD, Line, ranks
from tests.draws import one_of
from tests.frontends.layers.test_embedding import LAZY, LIMIT, lazy
from whale.errors import ProgramError
from whale.frontends.layers.vocabulary import EMPTY

STEPS, WIDTH = 4, 4


class Slots:
    """One bucket by its definition."""

    def __init__(self, slots: int, evict: str) -> None:
        self.slots, self.evict, self.time = slots, evict, 0
        self.of: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def step(self, ids: list[int]) -> None:
        once = list(dict.fromkeys(ids))
        self.time += 1
        owner = {slot: i for i, slot in self.of.items()}
        busy = {self.of[i] for i in once if i in self.of}
        free = [s for s in range(self.slots) if s not in busy]
        free.sort(key=lambda s: (self.used[owner[s]] if s in owner else -1, s))
        for new, slot in zip([i for i in once if i not in self.of], free):
            if slot in owner:
                del self.of[owner[slot]], self.used[owner[slot]]
            self.of[new], self.used[new] = slot, 0
        for i in set(once) & set(self.of):
            self.used[i] = self.time if self.evict == "lru" else self.used[i] + ids.count(i)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_ids_have_the_slots_that_a_dictionary_says(evict: str) -> None:
    layer, expected = made(8, evict=evict), Slots(8, evict)
    random = np.random.default_rng(0)
    for number in range(20):
        ids = (random.zipf(1.3, 9) % (20 if number % 3 else 1000) * 7919 - 5000).tolist()
        expected.step(ids)
        layer(tf.constant(ids, tf.int64), training=True)
        found = layer.vocabulary.find_slots(tf.constant(ids, tf.int64)).numpy().tolist()
        assert found == [expected.of.get(i, 8) for i in ids]
    assert len(expected.of) == 8 and np.count_nonzero(np.asarray(layer.vocabulary.ids) != EMPTY) == 8


def made(slots: int, **options: Any) -> Any:
    layer = wh.layers.Embedding(slots, WIDTH, dynamic=True, **options)
    layer.build()
    return layer


def test_buckets_fill_and_no_slot_is_two_ids() -> None:
    layer = made(320)
    for first in range(0, 1000, 100):
        layer(tf.range(first, first + 100, dtype=tf.int64), training=True)
    ids = np.asarray(layer.vocabulary.ids)
    held = ids[ids != EMPTY]
    assert len(held) == len(set(held)) > 0.95 * 320
    slots = layer.vocabulary.find_slots(tf.constant(held)).numpy()
    np.testing.assert_array_equal(ids[slots], held)


def rows(layer: Any, *ids: int, training: bool = False) -> np.ndarray:
    return np.asarray(layer(tf.constant(ids, tf.int64), training=training))


def test_a_row_is_drawn_anew_for_a_new_id_and_ids_without_a_slot_share_the_last() -> None:
    layer = made(2, embeddings_initializer=tf.keras.initializers.RandomUniform(-3.0, 5.0))
    first = rows(layer, 7, 8, training=True)
    assert np.abs(first[0] - first[1]).max() > 0 and first.min() >= -3 and first.max() < 5
    layer.embeddings.assign(tf.zeros((3, WIDTH)))
    assert not rows(layer, 7, 8, training=True).any()  # they have their slots
    np.testing.assert_array_equal(rows(layer, 9, training=True), rows(layer, 9))  # 7 made room
    rows(layer, 5, 6, training=True)
    np.testing.assert_array_equal(rows(layer, 7, 8, training=True), first)  # admitted again
    np.testing.assert_array_equal(rows(layer, 100, -1), np.asarray(layer.embeddings)[[2, 2]])
    assert not rows(made(2, embeddings_initializer="zeros"), 7, training=True).any()


def test_strings_are_ids_and_the_empty_one_is_none() -> None:
    layer = made(8, combiner="sum")
    words = tf.constant([["a", "b", ""], ["", "", ""], ["a", "", "c"]])
    rows = layer(words, training=True).numpy()
    assert np.count_nonzero(np.asarray(layer.vocabulary.ids) != EMPTY) == 3 and not rows[1].any()
    np.testing.assert_array_equal(layer(tf.constant([["a", "", ""]]))[0] + layer(tf.constant([["b"]]))[0], rows[0])


@LAZY
@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "Ftrl"])
def test_an_optimizer_begins_anew_with_a_slots_new_id(kind: str) -> None:
    """A slot's second id is trained as it would have been in an unused slot."""
    found = []
    for slots in (1, 2):  # with one slot the second id takes that of the first
        layer = made(slots)
        optimizer = wh.optimizers.lazy(getattr(tf.keras.optimizers, kind)(0.1))
        for number in (3, 3, 4, 4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(layer(tf.constant([number]), training=True) - 1))
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        found.append(rows(layer, 4))
        assert np.asarray(layer.vocabulary.fresh).sum() == 0
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "count, config, form",
    one_of(2, [
        (3, {"batch.shares": [2, 1, 1]}, {"evict": "lfu"}),
        (2, {"pipeline.micro_batches": 2}, {"weighted": True}),
        pytest.param(
            2, {}, {"optimizer": lazy},
            marks=LAZY,
        ),
    ], several=True),
)  # fmt: skip
def test_over_ranks_as_on_one_device(count: int, config: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    make = partial(Bags, dynamic=True, sharded=None, tables=1, **form)
    alone = make(ALONE, tf.float64)
    expected = trained(alone, tf.function)
    with ranks(Line("dynamic", make, 0, count, config)):
        model = make(SPREAD, tf.float64)
        for one, other in zip(expected, trained(model, wh.function)):
            np.testing.assert_array_equal(one, other)  # ids, what they were used, what is new
        for v, other in zip(alone.variables, model.variables):
            np.testing.assert_allclose(v.numpy(), other.numpy(), rtol=0, atol=LIMIT)
    assert np.count_nonzero(expected[0] != EMPTY) >= 40  # full


def trained(model: Bags, function: Any) -> list[np.ndarray]:
    step = function(model.step)
    for number in range(STEPS):
        step(*model.batch(number))
    return [v.numpy() for v in model.slots]


def test_saved_restored_and_exported(tmp_path: Any) -> None:
    make = partial(Bags, dynamic=True, sharded="columns", tables=1, combiner=None)
    line = Line("dynamic", make, 0, 2)

    def objects(model: Bags) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(all=[*model.slots, *model.variables])

    with ranks(line):
        model = make(SPREAD, tf.float32)
        slots = trained(model, wh.function)
        wh.CheckpointManager(objects(model), str(tmp_path / "saved"), 1).save()
        layer = model.layers[0]
        exported = tf.Module()
        exported.layer = layer
        exported.rows = tf.function(lambda ids: layer(ids), input_signature=[tf.TensorSpec((None,), tf.int64)])
        wh.export(exported, str(tmp_path / "exported"))
        ids = model.batch(STEPS - 1)[0][:, 0]
        expected, table = layer(ids).numpy(), model.variables[0].numpy()
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_array_equal(loaded.rows(ids), expected)
    with ranks(Line("dynamic", make, 0, 3)):
        model = make(SPREAD, tf.float32)
        wh.function(model.step)(*model.batch(9))
        wh.CheckpointManager(objects(model), str(tmp_path / "saved"), 1).restore_or_initialize()
        np.testing.assert_array_equal(model.variables[0].numpy(), table)
        for one, other in zip(slots, model.slots):
            np.testing.assert_array_equal(one, other.numpy())


@pytest.mark.parametrize(
    "options", [{"sharded": "rows"}, {"evict": "none"}, {"embeddings_initializer": "glorot_uniform"}]
)
def test_what_is_no_dynamic_table_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="Embedding does not accept th"):
        made(8, **options)
