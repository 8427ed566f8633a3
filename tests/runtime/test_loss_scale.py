"""precision.compute_dtype=float16: scaled losses, and steps that overflow on one rank, which are skipped on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ConfigError, PlanError
from whale.runtime import loss_scale

Start = Callable[..., None]
FLOAT16 = {"precision.compute_dtype": "float16"}


@pytest.fixture(autouse=True)
def _quick_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that adapts begins with 1024, and grows after two steps."""
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 1024.0)
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)


def batch(overflows: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    """16 rows; only the last one overflows in float16."""
    draw = np.random.default_rng(0).standard_normal
    x, y = draw((16, 12)).astype(np.float32), draw((16, 4)).astype(np.float32)
    x[15] *= 7e4 if overflows else 1.0
    return tf.constant(x), tf.constant(y)


class Model:
    """Two layers with statistics of their input, a counter of steps, and momentum that decays with the updates."""

    def __init__(self, function: Any, scope: Any = nullcontext) -> None:
        draw = np.random.default_rng(3).standard_normal
        self.weights = [tf.Variable(0.3 * draw(shape).astype(np.float32)) for shape in ((12, 24), (24, 4))]
        self.speeds = [tf.Variable(tf.zeros_like(w)) for w in self.weights]
        self.updates, self.steps = tf.Variable(0.0), tf.Variable(0)
        self.scope, self.step = scope, function(self._step)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scope():
                h = tf.nn.relu(x @ self.weights[0])
            with self.scope():
                loss = tf.reduce_mean(tf.square(h @ self.weights[1] - y))
        self.updates.assign_add(1.0)
        rate = 0.1 / self.updates
        for weight, speed, slope in zip(self.weights, self.speeds, tape.gradient(loss, self.weights)):
            speed.assign(0.5 * speed + slope)
            weight.assign_sub(rate * speed)
        return loss, self.steps.assign_add(1)

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (*self.weights, *self.speeds, self.updates)]


@pytest.mark.parametrize(
    ("count", "config", "scope"),
    [
        (1, {}, nullcontext),
        (2, {}, nullcontext),
        (2, {"pipeline.micro_batches": 2}, nullcontext),
        (2, {"memory.zero": 1, "memory.zero_min_bytes": 0}, nullcontext),
        (2, {"memory.zero": 3, "memory.zero_min_bytes": 0}, nullcontext),
        (2, {}, wh.split),
        (2, {}, wh.stage),
        (4, {"pipeline.micro_batches": 4, "memory.zero": 1, "memory.zero_min_bytes": 0}, wh.stage),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Start, count: int, config: Any, scope: Any) -> None:
    plain = Model(tf.function)
    for _ in range(4):
        losses = plain.step(*batch())[0]
    ranks(count, **FLOAT16, **config)
    model = Model(wh.function, scope)
    scales = []
    for overflows in (False, False, True, True, False, False):
        before = model.values()
        _, steps = model.step(*batch(overflows))
        scales.append(wh.loss_scale())
        for value, other in zip(model.values(), before):
            assert np.isfinite(value).all() and np.array_equal(value, other) == overflows
    # As Keras's LossScaleOptimizer: twice as much after two good steps in a row, half after a bad one.
    assert scales == [1024, 2048, 1024, 512, 512, 1024]
    assert int(steps) == 6  # what no update reads goes on
    for value, other in zip(model.values(), plain.values()):
        np.testing.assert_allclose(value, other, rtol=2e-2, atol=2e-3)
    assert losses < 10


def test_an_overflow_in_one_stage_skips_the_step_in_all(ranks: Start) -> None:
    """Gradients of the first stage's weights are beyond float16, those of the second one's are not."""
    ranks(2, **FLOAT16, **{"pipeline.micro_batches": 2})
    model = Model(wh.function, wh.stage)
    model.weights[0].assign(tf.fill((12, 24), 1e-6))
    before = model.values()
    loss, _ = model.step(tf.fill((16, 12), 5e4), tf.zeros((16, 4)))
    assert np.isfinite(loss) and wh.loss_scale() == 512.0
    for value, other in zip(model.values(), before):
        np.testing.assert_array_equal(value, other)
    model.step(*batch())
    assert all(np.isfinite(v).all() and not np.array_equal(v, o) for v, o in zip(model.values(), before))


def test_scaled_gradients_are_not_lost_below_the_range_of_float16(ranks: Start) -> None:
    def run(scale: float) -> np.ndarray:
        ranks(1, **{**FLOAT16, "precision.loss_scale": scale})
        weights = [tf.Variable(tf.ones((8, 8)) / 8) for _ in range(2)]

        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = 1e-8 * tf.reduce_mean((x @ weights[0]) @ weights[1])
            slopes = tape.gradient(loss, weights)
            for weight, slope in zip(weights, slopes):
                weight.assign_sub(0.0 * slope)
            return slopes[0]

        slope = step(tf.ones((4, 8))).numpy()
        wh.shutdown()
        return slope

    np.testing.assert_allclose(run(2.0**20), np.full((8, 8), 1e-8 / 8), rtol=1e-2)
    assert not run(1.0).any()  # nothing is left of 1e-8 / 256 in float16


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_the_rows_of_a_table_are_those_without_a_scale(ranks: Start, count: int) -> None:
    def trained(function: Any) -> np.ndarray:
        table = tf.Variable(np.arange(18, dtype=np.float32).reshape(6, 3) / 10)

        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(table, ids)))
            slope = tape.gradient(loss, table)
            assert isinstance(slope, tf.IndexedSlices)
            table.assign_sub(0.1 * tf.convert_to_tensor(slope))
            return loss

        function(step)(tf.constant([[1, 4], [1, 2], [0, 1], [5, 5]]))
        return table.numpy()

    plain = trained(tf.function)
    ranks(count, **FLOAT16)
    np.testing.assert_allclose(trained(wh.function), plain, rtol=1e-6)


def test_the_scale_goes_as_that_of_keras(ranks: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    keras_3 = hasattr(tf.keras.optimizers, "LossScaleOptimizer")
    scaled = tf.keras.optimizers.LossScaleOptimizer if keras_3 else tf.keras.mixed_precision.LossScaleOptimizer
    optimizer = scaled(tf.keras.optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=3)
    weight = tf.keras.Variable(np.ones(2, np.float32)) if keras_3 else tf.Variable(np.ones(2, np.float32))
    optimizer.build([weight])
    pattern = [False, False, False, True, False, False, True, False, False, False, False]
    expected = []
    for overflows in pattern:
        optimizer.apply_gradients([(tf.fill((2,), np.inf if overflows else 1.0), weight)])
        expected.append(float(optimizer.dynamic_scale if keras_3 else optimizer.loss_scale))
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 64.0)
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    ranks(1, **FLOAT16)
    model = Model(wh.function)
    found = []
    for overflows in pattern:
        model.step(*batch(overflows))
        found.append(wh.loss_scale())
    assert found == expected


def test_what_cannot_be_skipped_is_refused(ranks: Start) -> None:
    ranks(1, **FLOAT16)
    weight = tf.Variable(tf.ones((4, 4)))
    optimizer = tf.compat.v1.train.RMSPropOptimizer(0.1)

    @wh.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    with pytest.raises(PlanError, match="ResourceApplyRMSProp"):
        step(tf.ones((2, 4)))
    wh.shutdown()
    ranks(1)
    with pytest.raises(ConfigError, match="losses are not scaled"):
        wh.loss_scale()
