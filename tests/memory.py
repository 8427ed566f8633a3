"""The peak of a step's live bytes, as predicted before it runs and as asked of TensorFlow's allocator.

python -m tests.memory                                         # every model on one rank, as it is
python -m tests.memory --set memory.recompute=auto     # with other settings
python -m tests.memory --models gpt --set pipeline.micro_batches=4 --steps 40

Which of TensorFlow's threads is first decides what is alive together, so the peak of a step differs from the next
one's; a prediction is compared with their median.
"""

from __future__ import annotations

import abc
import argparse
import gc
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.predictions import allocations
from tests.forkserver import warm_python

MOST_ERROR = 0.10


def normal(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [1, sum(shape)])


class Model(abc.ABC):
    """Weights with momentum, and a loss of a batch."""

    rows: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __init__(self, function: Any = wh.function) -> None:
        self.weights = [tf.Variable(0.05 * normal(*shape)) for shape in self.shapes]
        self.speeds = [tf.Variable(tf.zeros(shape)) for shape in self.shapes]
        self.step = function(self._step)

    def batch(self) -> tf.Tensor:
        return normal(*self.rows)

    @abc.abstractmethod
    def loss(self, x: tf.Tensor) -> tf.Tensor: ...

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


MODELS: dict[str, type[Model]] = {"mlp": Mlp, "gpt": Gpt, "convnet": ConvNet}


def peaks_above(make: Callable[[], Callable[[], Any]], steps: int = 5) -> list[int]:
    """Of some steps, the most bytes asked for at a time beyond those live before it, sorted; ``make`` makes the step.

    The allocator's own figures would be of pieces, up to twice as large as what was asked for, by what ran before.
    """
    gc.collect()
    with allocations.recorded() as peaks:
        step = make()
        step()
        gc.collect()
        for _ in range(steps):
            allocations.step(step)
    assert len(peaks) == steps
    return sorted(one.most_bytes - one.before_bytes for one in peaks)


def measured_and_predicted(model: type[Model], steps: int = 8) -> tuple[list[int], int]:
    """(peaks of some steps, sorted; what was predicted), in bytes, under the run that was started."""
    gc.collect()
    with allocations.recorded() as peaks:
        made = model()
        x = made.batch()
        for _ in range(2):
            made.step(x)
        gc.collect()
        for _ in range(steps):
            allocations.step(lambda: made.step(x))
    report = wh.memory_report()
    (of_step,) = report.predicted.values()
    assert f"predicted for a step of {next(iter(report.predicted))}" in str(report)
    one = sum(4 * int(np.prod(s)) for s in model.shapes)
    assert of_step["parameters"] >= one <= of_step["optimizer state"]  # in whole pieces
    return sorted(one.most_bytes for one in peaks), sum(of_step.values())


def main() -> int:
    """Prints a line for each model; returns 1 when a prediction is more than 10 % off the median."""
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="configuration of the run")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    config: dict[str, Any] = dict(pair.split("=", 1) for pair in options.set)
    config = {key: int(value) if value.isdecimal() else value for key, value in config.items()}
    if len(options.models) > 1:  # each in a process of its own: the allocator keeps what models before it have left
        print(f"{'model':<10}{'predicted MB':>14}{'measured':>10}{'least':>8}{'most':>8}{'error %':>9}", flush=True)
        arguments = ["--set", *options.set, "--steps", str(options.steps)]
        command = [warm_python(), "-m", "tests.memory", *arguments, "--models"]
        return max(subprocess.run([*command, name], check=False).returncode for name in options.models)
    (name,) = options.models
    wh.init(config)
    peaks, predicted = measured_and_predicted(MODELS[name], options.steps)
    wh.shutdown()
    median = statistics.median(peaks)
    error = predicted / median - 1
    sizes = "".join(f"{n / 1e6:>{w}.1f}" for n, w in ((predicted, 14), (median, 10), (peaks[0], 8), (peaks[-1], 8)))
    print(f"{name:<10}{sizes}{100 * error:>+9.1f}", flush=True)
    return int(abs(error) > MOST_ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
