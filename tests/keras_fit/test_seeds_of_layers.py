"""Seeds of tf_keras' layers: graphs that find shapes, made again for the last batch, take none from the step's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import whale as wh

tf_keras: Any = pytest.importorskip("tf_keras")


def _fit() -> list[float]:
    tf_keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)

    class Model(tf_keras.Model):  # type: ignore[misc]
        """Makes its layers' graphs of the batches' sizes, as a Sequential without an input does."""

        def __init__(self) -> None:
            super().__init__()
            layers = tf_keras.layers
            self.parts = [tf_keras.Sequential([layers.Dense(8), layers.Dropout(0.4, seed=s)]) for s in (1, 5)]

        def call(self, x: Any, training: bool = False) -> Any:
            for part in self.parts:
                x = part(x, training=training)
            return x

    model = Model()
    model.compile(tf_keras.optimizers.SGD(0.05), "mse")
    past = model.fit(x, np.ones([11, 8], np.float32), batch_size=4, epochs=3, shuffle=False, verbose=0)
    return [float(loss) for loss in past.history["loss"]]


def test_shapes_found_again_for_another_size_leave_seeds_alone() -> None:
    wanted = _fit()
    wh.init({"communication.in_process_ranks": 2, "batch.random": "global"})
    try:
        found = _fit()
    finally:
        wh.shutdown()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
