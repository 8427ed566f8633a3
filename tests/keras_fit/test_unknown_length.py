"""Epochs of unknown length: plain Keras 3 counts one step too many at the end of each, Whale does not."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh

EPOCHS, BATCHES = 3, 4
X = np.random.default_rng(0).normal(size=(4 * BATCHES, 3)).astype(np.float32)
Y = X.sum(1)


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for at in range(0, len(X), 4):
        yield X[at : at + 4], Y[at : at + 4]


def _fit(is_known: bool, draws: bool = False) -> tuple[list[float], int]:
    keras.utils.set_random_seed(1)
    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None])
    data = tf.data.Dataset.from_generator(_batches, output_signature=spec)
    if is_known:
        data = data.apply(tf.data.experimental.assert_cardinality(BATCHES))
    model = keras.Sequential([keras.Input((3,)), *[keras.layers.Dropout(0.3)] * draws, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05) if draws else keras.optimizers.Adam(0.05), "mse")
    losses = model.fit(data, epochs=EPOCHS, verbose=0).history["loss"]
    return losses, int(model.optimizer.iterations)


@pytest.mark.skipif(not keras.__version__.startswith("3."), reason="Keras 2 counts as Whale does")
@pytest.mark.parametrize("draws", [False, True], ids=["a count of steps", "a seed generator"])
def test_a_step_without_data_is_not_counted(draws: bool) -> None:
    """Adam's corrections are those of later steps in plain Keras, and a dropout's masks are."""
    plain, counted = _fit(is_known=False, draws=draws)
    wanted, steps = _fit(is_known=True, draws=draws)
    wh.init({"communication.in_process_ranks": 2, "batch.random": "global"})
    try:
        found, counted_by_ranks = _fit(is_known=False, draws=draws)
    finally:
        wh.shutdown()
    assert (counted, steps, counted_by_ranks) == (EPOCHS * (BATCHES + 1), EPOCHS * BATCHES, EPOCHS * BATCHES)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert plain[0] == pytest.approx(wanted[0], rel=1e-5)
    assert plain[1] != pytest.approx(wanted[1], rel=1e-5)
