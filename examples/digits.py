"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits.

    whale run -np 2 examples/digits.py        on two processes
    python examples/digits.py --plain         on one device, without whale: the same program

The batch of 96 is global: each process computes its share of every batch, and all see the global loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

BATCH, LEARNING_RATE, SEED, TEST_ROWS = 96, 5e-2, 3, 360
ASKED_ACCURACY = 0.97


@dataclass(frozen=True)
class Device:
    """What differs between one device and many: the decorator of a step, the scope of the model, who prints."""

    function: Callable[[Callable[..., Any]], Any]
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    rank: int
    size: int


def one_device() -> Device:
    """TensorFlow as it is."""
    return Device(tf.function, contextlib.nullcontext, 0, 1)


def all_ranks() -> Device:
    """All processes that `whale run` started."""
    import whale as wh

    # Without it each process normalises its own rows: faster, but not what one process computes.
    wh.init({"sync_batch_norm": True})
    return Device(wh.function, wh.replica, wh.rank(), wh.size())


def batches(x: np.ndarray, y: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch of full batches, in an order that the seed decides."""
    order = np.random.default_rng(seed).permutation(len(x))
    for start in range(0, len(x) - BATCH + 1, BATCH):
        rows = order[start : start + BATCH]
        yield x[rows], y[rows]


class Digits:
    """Model, optimizer and steps."""

    def __init__(self, device: Device) -> None:
        tf.keras.utils.set_random_seed(SEED)
        layers = tf.keras.layers
        with device.scope():
            self.model = tf.keras.Sequential(
                [
                    layers.Input((8, 8, 1)),
                    layers.Conv2D(16, 3, padding="same", use_bias=False),
                    layers.BatchNormalization(momentum=0.9),
                    layers.ReLU(),
                    layers.Conv2D(32, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Flatten(),
                    layers.Dense(64, activation="relu"),
                    layers.Dense(10),
                ]
            )
        self.optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
        self.step = device.function(self._step)
        self.count_right = device.function(self._count_right)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    def _count_right(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(self.model(x, training=False), axis=1, output_type=tf.int32)
        return tf.reduce_sum(tf.cast(tf.equal(found, y), tf.int32))


class Report:
    """Progress on rank 0: a bar on a terminal, otherwise one line per epoch."""

    def __init__(self, device: Device, epochs: int, steps: int) -> None:
        # Under `whale run` stdout is a pipe to the launcher, which says whether it writes to a terminal.
        self._terminal = sys.stdout.isatty() or os.environ.get("WHALE_TTY") == "1"
        self._mute, self._epochs, self._steps = device.rank != 0, epochs, steps
        # The launcher puts "[rank] " in front of each line.
        width = int(os.environ.get("COLUMNS", "80")) - len(f"[{device.size}] ")
        console = Console(force_terminal=True, width=width) if self._terminal else Console()
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]:2d}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} samples/s"),
            console=console,
            disable=self._mute or not self._terminal,
        )
        self._task = self._progress.add_task("", total=epochs * steps, epoch=0, loss=0.0, speed=0.0)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, epoch: int, loss: float, samples_per_s: float) -> None:
        self._progress.update(self._task, advance=1, epoch=epoch + 1, loss=loss, speed=samples_per_s)

    def epoch(self, epoch: int, loss: float, samples_per_s: float) -> None:
        if not self._terminal:
            self.say(f"epoch {epoch + 1:2d}/{self._epochs}  loss {loss:.4f}  {samples_per_s:,.0f} samples/s")

    def say(self, text: str) -> None:
        if not self._mute:
            print(text, flush=True)


def train(device: Device, x: np.ndarray, y: np.ndarray, epochs: int) -> tuple[Digits, list[float]]:
    """Trains from the same start each time; returns the losses of all steps."""
    digits, losses, steps = Digits(device), [], len(x) // BATCH
    start_s = 0.0
    with Report(device, epochs, steps) as report:
        for epoch in range(epochs):
            for batch in batches(x, y, seed=epoch):
                losses.append(float(digits.step(*batch)))
                if len(losses) == 1:
                    # The first step builds the graph: it is no measure of speed.
                    start_s = time.perf_counter()
                    if device.size > 1:
                        report.say(_one_screen(digits.step.plan(*batch)).rstrip())
                else:
                    speed = (len(losses) - 1) * BATCH / (time.perf_counter() - start_s)
                    report.step(epoch, losses[-1], speed)
            report.epoch(epoch, losses[-1], speed)
    return digits, losses


def _one_screen(plan: Any) -> str:
    from whale.ir.plan_text import format_plan

    return format_plan(plan)


def noise(device: Device, x: np.ndarray, y: np.ndarray, losses: list[float]) -> float:
    """Largest difference of the first losses when each batch has its rows in another order: rounding, nothing else."""
    digits, generator, worst = Digits(device), np.random.default_rng(SEED), 0.0
    stream = (batch for epoch in range(len(losses)) for batch in batches(x, y, seed=epoch))
    for loss, (rows, labels) in zip(losses, stream):
        order = generator.permutation(BATCH)
        worst = max(worst, abs(float(digits.step(rows[order], labels[order])) - loss))
    return worst


def main() -> int:
    """Exit code 1 when the accuracy on the test rows is below 97 %."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="one device; whale is not imported")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--results", type=Path, help="rank 0 writes losses and accuracy to this JSON file")
    parser.add_argument("--noise-steps", type=int, default=0, help="measure the rounding noise of that many losses")
    options = parser.parse_args()
    device = one_device() if options.plain else all_ranks()

    data = load_digits()
    x, y = (data.images[..., None] / 16).astype(np.float32), data.target.astype(np.int32)
    digits, losses = train(device, x[TEST_ROWS:], y[TEST_ROWS:], options.epochs)
    accuracy = int(digits.count_right(x[:TEST_ROWS], y[:TEST_ROWS])) / TEST_ROWS
    results = {"losses": losses, "accuracy": accuracy, "learning_rate": LEARNING_RATE}
    if options.noise_steps:
        results["noise"] = noise(device, x[TEST_ROWS:], y[TEST_ROWS:], losses[: options.noise_steps])
    if device.rank == 0:
        print(f"test accuracy {accuracy:.1%} after {len(losses)} steps", flush=True)
        if options.results:
            options.results.write_text(json.dumps(results))
    if options.plain and "whale" in sys.modules:
        raise RuntimeError("the plain run imported whale: it is no reference")
    return int(accuracy < ASKED_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
