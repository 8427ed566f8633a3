"""What another process is told of callbacks, and which data a process that joins ``fit`` refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale.distributed.msgpack_values import pack, unpack
from whale.errors import ProgramError
from whale.frontends.keras.elastic_fit import (
    _OTHER,
    FitCall,
    _find_changes,
    _keep_value,
    _refuse_shared,
    _refuse_unknown,
    _restore_value,
)

pytestmark = pytest.mark.core


@pytest.mark.skipif(not hasattr(keras, "ops"), reason="a joining rank takes up the fit of Keras 3")
def test_callbacks_are_told_by_what_has_changed_and_is_plain() -> None:
    stops = keras.callbacks.EarlyStopping("val_loss", min_delta=0.5)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    stops.set_model(model)
    stops.on_train_begin()

    def kept() -> dict[str, object]:
        found = {name: _keep_value(value) for name, value in vars(stops).items() if name != "_model"}
        return {name: value for name, value in found.items() if value is not _OTHER}

    before = kept()
    stops.on_epoch_end(0, {"val_loss": 2.0})
    told = unpack(pack(_find_changes(before, kept())))
    assert {name: _restore_value(value) for name, value in told.items()} == {
        "best": 2.0,
        "monitor_op": keras.ops.less,
        "min_delta": -0.5,
    }


def test_what_is_kept_stays_as_it_was() -> None:
    small, numbers = np.zeros(3), [1, {"a": (2, 3)}]
    kept = _keep_value([small, numbers])
    small += 1
    numbers.append(4)
    assert np.array_equal(kept[0], np.zeros(3)) and kept[1] == [1, {"a": (2, 3)}]
    assert _keep_value([1, object()]) is _OTHER and _keep_value(lambda: 1) is _OTHER


def test_a_generator_of_batches_cannot_be_taken_up() -> None:
    _refuse_unknown({"a": np.zeros(3), "b": tf.zeros(3)})
    _refuse_unknown(tf.data.Dataset.range(3))
    with pytest.raises(ProgramError, match="data of type generator"):
        _refuse_unknown(iter_ for iter_ in range(3))


def test_validation_behind_the_same_shuffle_cannot_be_taken_up() -> None:
    data = tf.data.Dataset.range(9)
    _refuse_shared(data.skip(3).shuffle(6, seed=1).batch(3), data.take(3).batch(3))
    _refuse_shared(np.zeros(3), (np.zeros(3), np.zeros(3)))
    shuffled = data.shuffle(9, seed=1)
    with pytest.raises(ProgramError, match="share a shuffle"):
        _refuse_shared(shuffled.skip(3).batch(3), shuffled.take(3).batch(3))


def test_nobody_takes_up_a_fit_whose_callbacks_read_what_is_shuffled_each_time() -> None:
    class Elastic:
        commits = 0

        def commit(self, state: object, steps_left: int | None) -> None:
            self.commits += 1

    data = tf.data.Dataset.range(9)
    context: Any = SimpleNamespace(seeds=None, rank=0)
    elastic: Any = Elastic()
    model: Any = SimpleNamespace(_initial_epoch=0, history=SimpleNamespace())
    iterator = SimpleNamespace(elements=SimpleNamespace(place=(0, 0)))
    fit = FitCall(context, elastic, model, {"x": data.shuffle(9, seed=1).batch(3)})
    fit.read_beside(data.shuffle(9, seed=1, reshuffle_each_iteration=False).batch(3), context)
    fit.read_beside(np.zeros(3), context)
    fit.commit(iterator)
    assert elastic.commits == 1
    fit.read_beside(data.shuffle(9, seed=1).take(3).batch(3), context)
    fit.commit(iterator)
    assert elastic.commits == 1
