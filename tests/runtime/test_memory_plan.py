"""Memory that is predicted before a step runs: against the allocator's figures, and against a limit."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import PlanError
from whale_ops.memory import memory, reset_peak

Start = Callable[..., None]
# Which of TensorFlow's threads is first decides what is alive together, and the peak of one step differs from the next
# one's by up to a third; a prediction is compared with the range of some steps.
LARGEST_ERROR = 0.15


def normal(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [1, sum(shape)])


class Model:
    """Weights with momentum, and a loss of a batch."""

    rows: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __init__(self, function: Any = wh.function) -> None:
        self.weights = [tf.Variable(0.05 * normal(*shape)) for shape in self.shapes]
        self.speeds = [tf.Variable(tf.zeros(shape)) for shape in self.shapes]
        self.step = function(self._step)

    def batch(self) -> tf.Tensor:
        return normal(*self.rows)

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        for weight, speed, slope in zip(self.weights, self.speeds, tape.gradient(loss, self.weights)):
            speed.assign(0.9 * speed + slope)
            weight.assign_sub(0.01 * speed)
        return loss


class Mlp(Model):
    rows = (1024, 256)
    shapes = ((256, 384), *[(384, 384)] * 12, (384, 256))

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        for weight in self.weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square(x))


class Gpt(Model):
    """Two blocks of causal attention and two products over an embedding; 64 sequences of 64 bytes."""

    rows = (64, 64)
    shapes = ((512, 128), *[(128, 384), (128, 128), (128, 512), (512, 128)] * 2)

    def batch(self) -> tf.Tensor:
        return tf.constant(np.random.default_rng(0).integers(512, size=self.rows))

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        table, blocks = self.weights[0], self.weights[1:]
        mask = tf.linalg.band_part(tf.ones((64, 64)), -1, 0)
        y = tf.gather(table, x)
        for i in range(0, len(blocks), 4):
            q, k, v = (tf.transpose(tf.reshape(t, (-1, 64, 4, 32)), (0, 2, 1, 3)) for t in
                       tf.split(self._normed(y) @ blocks[i], 3, -1))  # fmt: skip
            seen = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) - 1e9 * (1.0 - mask))
            y += tf.reshape(tf.transpose(seen @ v, (0, 2, 1, 3)), (-1, 64, 128)) @ blocks[i + 1]
            y += tf.nn.gelu(self._normed(y) @ blocks[i + 2]) @ blocks[i + 3]
        logits = tf.tensordot(self._normed(y), tf.transpose(table), 1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(x[:, 1:], logits[:, :-1]))

    def _normed(self, y: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(y, -1, keepdims=True)
        return (y - mean) * tf.math.rsqrt(variance + 1e-6)


class ConvNet(Model):
    rows = (256, 32, 32, 8)
    shapes = ((3, 3, 8, 16), *[(3, 3, 16, 16)] * 3, (3, 3, 16, 32), (32, 100))

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        for i, weight in enumerate(self.weights[:-1]):
            x = tf.nn.relu(tf.nn.conv2d(x, weight, 1 + i % 2, "SAME"))
        return tf.reduce_mean(tf.square(tf.reduce_mean(x, (1, 2)) @ self.weights[-1]))


def measured_and_predicted(model: type[Model]) -> tuple[list[int], int]:
    """(peaks of some steps, sorted; what was predicted)."""
    gc.collect()
    before = memory().live_bytes
    made = model()
    x = made.batch()
    for _ in range(2):
        made.step(x)
    gc.collect()
    peaks = []
    for _ in range(8):
        reset_peak()
        made.step(x)
        peaks.append(memory().peak_bytes - before)
    report = wh.memory_report()
    (of_step,) = report.predicted.values()
    assert f"predicted for a step of {next(iter(report.predicted))}" in str(report)
    one = sum(4 * int(np.prod(s)) for s in model.shapes)
    assert of_step["parameters"] >= one <= of_step["slots"]  # in whole pieces
    return sorted(peaks), sum(of_step.values())


def agree(peaks: list[int], predicted: int) -> bool:
    return (1 - LARGEST_ERROR) * peaks[0] <= predicted <= (1 + LARGEST_ERROR) * peaks[-1]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("model", [Mlp, Gpt, ConvNet])
def test_the_measured_peak_is_the_predicted_one(ranks: Start, model: type[Model], micro_batches: int) -> None:
    ranks(1, **{"pipeline.num_micro_batch": micro_batches})
    peaks, predicted = measured_and_predicted(model)
    assert agree(peaks, predicted), (peaks, predicted)


def test_recomputation_takes_what_is_predicted(ranks: Start) -> None:
    found = []
    for kind in ("", "auto"):
        ranks(1, **{"gradient_checkpoint.type": kind})
        found.append(measured_and_predicted(Gpt))
        wh.shutdown()
    (held, _), (peaks, predicted) = found
    assert peaks[-1] < 0.8 * held[0] and agree(peaks, predicted), found


def test_a_step_that_does_not_fit_is_refused_and_an_option_that_is_named_fits(ranks: Start) -> None:
    def refused(**config: Any) -> str:
        ranks(2, **{"memory.limit_bytes": 24 << 20, "zero.min_bytes": 0, **config})
        model = Mlp()
        start = [w.numpy() for w in model.weights]
        with pytest.raises(PlanError) as error:
            model.step(model.batch())
        for weight, value in zip(model.weights, start):
            np.testing.assert_array_equal(weight, value)
        wh.shutdown()
        return str(error.value)

    text = refused()
    assert "device: rank 0, and 1 other ranks" in text and "24.0 MiB (memory.limit_bytes)" in text, text
    named = re.search(r"(?:set|or) ([a-z_.]+=\w+(?: with [a-z_.]+=\w+)?) \(", text)
    assert named is not None, text
    pairs = (pair.split("=") for pair in named[1].split(" with "))
    options = {key: int(value) if value.isdecimal() else value for key, value in pairs}
    ranks(2, **{"memory.limit_bytes": 24 << 20, "zero.min_bytes": 0, **options})
    model = Mlp()
    assert np.isfinite(model.step(model.batch()))
    wh.shutdown()
    assert "nothing that was tried makes it fit" in refused(**{"memory.limit_bytes": 1 << 20})
