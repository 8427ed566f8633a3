"""Script of test_unequal.py for `whale run`: programs on two GPUs, of which the second has less memory and is slower.

    unequal.py FOLDER

Prints one line of JSON, rank 0 what all ranks have. Without `whale run` it is what one device computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SPREAD = "WHALE_RANK" in os.environ
ROW = 400_000  # elements: 3.2 MB
TRIES = 5  # of measuring and choosing: beside other tests exchanges may take so long that one GPU is better alone


@contextlib.contextmanager
def ranks(**config: Any) -> Iterator[Callable[..., Any]]:
    """Gives what makes a step of a function, on ranks of this configuration or on one device."""
    if not SPREAD:
        yield tf.function
        return
    import whale as wh

    wh.init({key.replace("__", "."): value for key, value in config.items()})
    yield wh.function


def wide_rows(function: Callable[..., Any]) -> list[float]:
    """Losses of a step of which each row takes much memory, and the weights little."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((8, ROW))
    w = tf.Variable(generator.standard_normal(ROW) / 100)

    @function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x * w)
            for _ in range(4):
                hidden = tf.tanh(hidden + x)
            loss = tf.reduce_mean(tf.square(hidden - 1.0))
        w.assign_sub(1e5 * tape.gradient(loss, w))
        return loss

    return [float(step(x)) for _ in range(2)]


def products(function: Callable[..., Any]) -> list[float]:
    """Losses of a step that computes much longer than it exchanges, also where other tests slow exchanges down."""
    generator = np.random.default_rng(2)
    weights = [tf.Variable(generator.standard_normal((128, 128)) / 11) for _ in range(4)]
    x = generator.standard_normal((8192, 128))

    @function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.tanh(hidden @ weight)
            loss = tf.reduce_mean(tf.square(hidden - 0.5))
        for weight, slope in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(10.0 * slope)
        return loss

    return [float(step(x)) for _ in range(3)]


def fitted() -> list[float]:
    """Losses of a convolutional network of Keras, which asks for XLA by itself where there is a GPU."""
    keras.utils.set_random_seed(3)
    keras.backend.set_floatx("float64")
    layers = [keras.layers.Conv2D(4, 3, activation="tanh"), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    generator = np.random.default_rng(4)
    x, y = generator.standard_normal((16, 6, 6, 2)), generator.integers(0, 3, 16)
    return [float(one) for one in model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]]


def main() -> None:
    said: dict[str, Any] = {}
    with ranks(batch__shares=[7, 1]) as function:
        said["wide rows"] = wide_rows(function)
        if SPREAD:
            said["peak_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    if SPREAD:
        from whale.errors import PlanError

        with ranks(batch__shares=[1, 7]) as function:
            try:
                wide_rows(function)
            except PlanError as error:
                said["refused"] = str(error)
    for _ in range(TRIES):
        with ranks(mesh__auto_parallel=True) as function:
            said["products"] = products(function)
            if SPREAD:
                from whale.runtime import context

                chosen = context.require_current().planning.auto
                assert chosen is not None
                said["shares"], said["name"] = list(chosen.strategy.shares), chosen.strategy.name
        if not SPREAD or said["shares"]:
            break
    with ranks(batch__shares=[5, 3]):
        said["fit"] = fitted()
    rank = os.environ.get("WHALE_RANK", "alone")
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(said))


main()
