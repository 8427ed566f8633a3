"""Step time of `wh.function` on one rank beside plain `tf.function`, in one process, interleaved.

    python -m benchmarks.one_process [--pairs 40]

Two copies of the same model are stepped alternately, so that what else the machine does meets both. Prints the
median step time of each and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.steps import train_step


def mlp() -> tuple[Any, np.ndarray]:
    """Steps of well under a millisecond of arithmetic: what is measured is the call."""
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    return model, np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)


def mobilenet() -> tuple[Any, np.ndarray]:
    """MobileNetV2 of full width on 8 images of 32x32."""
    model = tf.keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=10, classifier_activation=None)
    return model, np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)


def make_step(
    make_model: Callable[[], tuple[Any, np.ndarray]], function: Callable[[Callable[..., Any]], Any]
) -> Callable[[], float]:
    """A training step with Adam, already traced; returns its loss."""
    tf.keras.utils.set_random_seed(1)
    model, x = make_model()
    wrapped = function(train_step(model))
    inputs = tf.constant(x), tf.constant(np.arange(len(x)) % 10, tf.int32)
    wrapped(*inputs)
    return lambda: float(wrapped(*inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="interleaved measurements of each program")
    options = parser.parse_args()
    wh.init()
    for make_model in (mlp, mobilenet):
        steps = {"tf.function": make_step(make_model, tf.function), "wh.function": make_step(make_model, wh.function)}
        times_s: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(5 + options.pairs):
            for name, step in steps.items():
                start_s = time.perf_counter()
                step()
                if index >= 5:
                    times_s[name].append(time.perf_counter() - start_s)
        medians_s = {name: statistics.median(values) for name, values in times_s.items()}
        ratio = medians_s["wh.function"] / medians_s["tf.function"]
        shown = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in medians_s.items())
        print(f"{make_model.__name__:10s} medians of {options.pairs}: {shown}, ratio {ratio:.3f}")
    wh.shutdown()


if __name__ == "__main__":
    main()
