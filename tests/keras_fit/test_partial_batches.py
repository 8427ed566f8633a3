"""Losses of single outputs, where the last batch of an epoch has fewer rows: ranks of this process, and plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh


def _losses(batches: tf.data.Dataset) -> dict[str, list[float]]:
    keras.utils.set_random_seed(1)
    given = keras.Input((4,))
    outputs = [keras.layers.Dense(1, name="one")(given), keras.layers.Dense(2, name="other")(given)]
    model = keras.Model(given, outputs)
    model.compile(keras.optimizers.SGD(0.01), ["mse", "mse"])
    return model.fit(batches, epochs=2, verbose=0).history


def test_losses_of_outputs_are_averaged_as_plain_keras_averages_them() -> None:
    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    x[8:] *= 3  # so that it matters how much the rows of the last batch count
    batches = tf.data.Dataset.from_tensor_slices((x, (x.sum(1), x[:, :2]))).batch(4)
    plain = _losses(batches)
    wh.init({"communication.in_process_ranks": 2})
    try:
        found = _losses(batches)
    finally:
        wh.shutdown()
    assert found.keys() == plain.keys() == {"loss", "one_loss", "other_loss"}
    for name, values in plain.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("targets", ["of one output", "of named outputs"])
def test_targets_that_keras_arranges_as_the_outputs_are(targets: str) -> None:
    def train() -> dict[str, list[float]]:
        keras.utils.set_random_seed(1)
        given = keras.Input((4,))
        outputs = [keras.layers.Dense(1, name="one")(given), keras.layers.Dense(2, name="other")(given)]
        model = keras.Model(given, outputs)
        losses = [None, "mse"] if targets == "of one output" else {"one": "mae", "other": "mse"}
        model.compile(keras.optimizers.SGD(0.01), losses)
        y: object = x[:, :2] if targets == "of one output" else {"other": x[:, :2], "one": x.sum(1)}
        return model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), epochs=2, verbose=0).history

    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    plain = train()
    wh.init({"communication.in_process_ranks": 2})
    try:
        found = train()
    finally:
        wh.shutdown()
    assert found.keys() == plain.keys()
    for name, values in plain.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
