"""Trains a small convolutional network on 1,797 handwritten digits (E. Alpaydin, C. Kaynak; UCI, 1998; CC BY 4.0).

    whale run -np 2 examples/digits.py        on two processes
    python examples/digits.py --plain         on one device, without whale: the same program

The batch of 96 is global: each process computes its share of every batch, and all see the global loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

BATCH, LEARNING_RATE, SEED, TEST_ROWS = 96, 5e-2, 3, 360
layers = tf.keras.layers


def batches(x: np.ndarray, y: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch of full batches, in an order that the seed decides."""
    order = np.random.default_rng(seed).permutation(len(x))
    for start in range(0, len(x) - BATCH + 1, BATCH):
        rows = order[start : start + BATCH]
        yield x[rows], y[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="one device; whale is not imported")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--results", type=Path, help="rank 0 writes losses and accuracy into this file")
    parser.add_argument("--precision", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()

    function: Any = tf.function
    scope: Any = contextlib.nullcontext
    rank, size = 0, 1
    if not options.plain:
        import whale as wh

        wh.init({"batch.norm_statistics": "batch"})  # else each process normalises its own rows
        function, scope, rank, size = wh.function, wh.replica, wh.rank(), wh.size()
    tf.keras.utils.set_random_seed(SEED)
    tf.keras.backend.set_floatx(options.precision)
    with scope():
        model = tf.keras.Sequential(
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
    optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    @function
    def count_right(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(model(x, training=False), axis=1, output_type=tf.int32)
        return tf.reduce_sum(tf.cast(tf.equal(found, y), tf.int32))

    digits = np.load(Path(__file__).with_name("digits.npz"))
    x, y = (digits["images"][..., np.newaxis] / 16).astype(options.precision), digits["labels"].astype(np.int32)
    losses = []
    for epoch in range(options.epochs):
        for rows, named in batches(x[TEST_ROWS:], y[TEST_ROWS:], seed=epoch):
            losses.append(float(step(rows, named)))
        if rank == 0:
            print(f"epoch {epoch + 1:2d}/{options.epochs}  loss {losses[-1]:.4f}", flush=True)
    accuracy = int(count_right(x[:TEST_ROWS], y[:TEST_ROWS])) / TEST_ROWS
    if rank == 0:
        print(f"test accuracy {accuracy:.1%} after {len(losses)} steps on {size} rank{'s' * (size > 1)}", flush=True)
    if rank == 0 and options.results:
        options.results.write_text(json.dumps({"losses": losses, "accuracy": accuracy}))
    if options.plain and "whale" in sys.modules:
        raise RuntimeError("the plain run imported whale: it is no reference")


if __name__ == "__main__":
    main()
