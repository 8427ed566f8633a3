"""Measures what named random streams, known orders of datasets and compared inputs cost a step.

    whale run -np 2 benchmarks/equality.py [--blocks 40] [--steps 200]

A small perceptron, of which two processes take some 1,000 steps a second, is compiled with and without each of these.
Blocks of steps are taken in turns, with it, without, without, with it; printed are medians over blocks, and the
quartiles of the ratio of two blocks with it to the two without that they surround. Where the machine's noise hides what
a comparison takes, its own time tells: another line is the part of the blocks with it that was spent in comparing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import whale as wh
from whale.runtime.input import equal_inputs

ROWS, FEATURES, LAYERS = 128, 128, 3
STEP = "whale.runtime.compile.step"
ORDERS = "whale.runtime.input.shuffle_orders._find_generator"


def made_step(dropout: bool) -> Any:
    """A training step of a perceptron."""
    kernels = [tf.Variable(tf.random.stateless_normal([FEATURES, FEATURES], [i, 0]) / 8.0) for i in range(LAYERS)]

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = x
            for kernel in kernels:
                hidden = tf.tanh(hidden @ kernel)
                if dropout:
                    hidden = tf.nn.dropout(hidden, 0.1, seed=3)
            loss = tf.reduce_mean(tf.square(hidden))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels)):
            kernel.assign_sub(1e-3 * gradient)
        return loss

    return step


def compared(steps: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Blocks of steps whose inputs are compared as often as by default, and of steps whose inputs are not."""
    x = tf.random.stateless_normal([ROWS, FEATURES], [1, 1])
    with_it, without = made_step(False), made_step(False)
    with_it(x)
    with mock.patch(f"{STEP}.compare_arguments", lambda call, *_: call):
        without(x)
    return (lambda: _taken(with_it, [x] * steps)), (lambda: _taken(without, [x] * steps))


def streams(steps: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Blocks of steps with dropout that draw from named streams, and from those of TensorFlow's kernels."""
    from whale.runtime.compile.step import lower_to_function

    x = tf.random.stateless_normal([ROWS, FEATURES], [1, 1])
    with_it, without = made_step(True), made_step(True)
    with_it(x)
    with mock.patch(f"{STEP}.lower_to_function", lambda ranks, tag, *_: lower_to_function(ranks, tag)):
        without(x)
    return (lambda: _taken(with_it, [x] * steps)), (lambda: _taken(without, [x] * steps))


def orders(steps: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Epochs over a dataset of which the order is known, and of one of which it is not."""
    step = made_step(False)

    def dataset() -> Any:
        x = tf.random.stateless_normal([steps * ROWS, FEATURES], [2, 2])
        return wh.shard(tf.data.Dataset.from_tensor_slices(x).shuffle(4 * ROWS, seed=1).batch(ROWS))

    with_it = dataset()
    with mock.patch(ORDERS, lambda shuffle: None):
        without = dataset()
        list(without)
    return (lambda: _taken(step, with_it)), (lambda: _taken(step, without))


def _taken(step: Any, batches: Any) -> None:
    for batch in batches:
        loss = step(batch)
    float(loss)


class Timed:
    """Adds up how long the calls of a function take."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.took_s = function, 0.0

    def __call__(self, *args: Any, **more: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return self._function(*args, **more)
        finally:
            self.took_s += time.perf_counter() - start_s


def seconds(block: Callable[[], None]) -> float:
    """Measures how long one block of steps takes."""
    start_s = time.perf_counter()
    block()
    return time.perf_counter() - start_s


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--blocks", type=int, default=40)
    arguments.add_argument("--steps", type=int, default=200)
    asked = arguments.parse_args()
    wh.init({"batch.random": "global"})
    comparing = Timed(equal_inputs.refuse_other_values)
    equal_inputs.refuse_other_values = comparing  # type: ignore[assignment]
    for name, make in (("comparing inputs", compared), ("random streams", streams), ("orders of datasets", orders)):
        with_it, without = make(asked.steps)
        seconds(with_it), seconds(without)
        comparing.took_s, found = 0.0, []
        for _ in range(asked.blocks):
            first, *others, last = [seconds(block) for block in (with_it, without, without, with_it)]
            found.append(((first + last) / 2, sum(others) / 2))
        rates = [asked.steps / statistics.median(column) for column in zip(*found)]
        quartiles = statistics.quantiles([100 * (one / other - 1) for one, other in found], n=4)
        if wh.rank() == 0:
            low, middle, high = (f"{cost:+.2f}" for cost in quartiles)
            print(f"{name}: {rates[0]:.0f} steps/s, without {rates[1]:.0f}: {middle} % ({low} to {high})", flush=True)
            if name == "comparing inputs":
                part = comparing.took_s / (2 * sum(with_s for with_s, _ in found))
                print(f"in comparisons themselves: {100 * part:.2f} %", flush=True)


if __name__ == "__main__":
    main()
