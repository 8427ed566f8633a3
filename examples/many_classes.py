"""A classifier of very many classes, whose last weight is divided over the ranks.

    python examples/many_classes.py --plain              one device, TensorFlow alone
    whale run -np 2 examples/many_classes.py             two processes
    whale run -np 2 examples/many_classes.py --data-parallel      for comparison

Each class has a code, a random vector; an example is its class's code with noise. The hidden layer is under
`wh.replica()`, so its rows are divided. The classifier and its loss are under `wh.split()`: each rank holds the weights
of some of the classes, and neither the weight, nor its gradient, nor the logits are ever sent.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import numpy as np
import tensorflow as tf

CODE = 32


def main() -> None:
    """Trains for some steps and prints the loss, and what a step moves between ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="one device, without Whale")
    parser.add_argument("--data-parallel", action="store_true", help="divide rows only")
    options = parser.parse_args()

    function: Any = tf.function
    replica: Any = contextlib.nullcontext
    split: Any = contextlib.nullcontext
    first = True
    if not options.plain:
        import whale as wh

        wh.init()
        function, replica, split = wh.function, wh.replica, wh.replica if options.data_parallel else wh.split
        first = wh.rank() == 0

    tf.keras.utils.set_random_seed(1)
    generator = np.random.default_rng(1)
    codes = generator.normal(size=(options.classes, CODE)).astype(np.float32)
    hidden = tf.keras.layers.Dense(options.width, activation="relu")
    classifier = tf.keras.layers.Dense(options.classes)
    hidden.build((None, CODE))
    classifier.build((None, options.width))
    optimizer = tf.keras.optimizers.SGD(1.0)
    weights = hidden.trainable_variables + classifier.trainable_variables
    optimizer.build(weights)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with replica():
                h = hidden(x)
            with split():
                logits = classifier(h)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    def batch() -> tuple[np.ndarray, np.ndarray]:
        labels = generator.integers(min(options.classes, 100), size=options.batch).astype(np.int32)
        noise = generator.normal(scale=0.1, size=(options.batch, CODE))
        return (codes[labels] + noise).astype(np.float32), labels

    x, y = batch()
    if not options.plain:
        plan = step.plan(x, y)
        if first:
            whole = codes.shape[0] * options.width * 4
            print(f"a step moves {plan.logical_bytes:,} bytes; the classifier's weight has {whole:,}")
    for index in range(options.steps):
        start_s = time.perf_counter()
        loss = float(step(x, y))
        if first:
            print(f"step {index}: loss {loss:.4f}, {1000 * (time.perf_counter() - start_s):.0f} ms")
        x, y = batch()


if __name__ == "__main__":
    main()
