"""A mixture of experts: every rank holds some of the experts, and tokens travel to theirs and back.

    python examples/moe.py
    whale run -np 2 examples/moe.py

Sixteen kinds of sequences are told apart by a network whose feed-forward layer is eight experts, two for each token.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import whale as wh

KINDS, LENGTH, WIDTH, EXPERTS, ROWS = 16, 16, 32, 8, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    wh.init()
    tf.keras.utils.set_random_seed(1)
    inside = tf.keras.layers.Dense(WIDTH)
    experts = wh.layers.MoE(EXPERTS, 4 * WIDTH, top_k=2)  # enters wh.split() itself
    outside = tf.keras.layers.Dense(KINDS)
    for layer, shape in ((inside, (None, LENGTH, 8)), (experts, (None, LENGTH, WIDTH)), (outside, (None, WIDTH))):
        layer.build(shape)
    weights = [v for layer in (inside, experts, outside) for v in layer.trainable_variables]
    optimizer = tf.keras.optimizers.Adam(3e-3)
    optimizer.build(weights)

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            h = inside(x)
            h = h + experts(h)
            logits = outside(tf.reduce_mean(h, axis=1))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
            total = loss + tf.add_n(experts.losses)  # of the router: even load, small logits
        optimizer.apply_gradients(zip(tape.gradient(total, weights), weights))
        return loss, experts.load

    generator = np.random.default_rng(1)
    patterns = generator.normal(size=(KINDS, LENGTH, 8))
    for number in range(options.steps):
        y = generator.integers(KINDS, size=ROWS).astype("int32")
        x = (patterns[y] + 0.5 * generator.normal(size=(ROWS, LENGTH, 8))).astype("float32")
        if number == 0 and wh.rank() == 0:
            print(f"{EXPERTS} experts on {wh.size()} ranks", flush=True)
        loss, load = step(x, y)
        if wh.rank() == 0 and (number % 40 == 0 or number == options.steps - 1):
            shares = " ".join(f"{share:.0%}" for share in np.asarray(load))
            print(f"step {number:3d}  loss {float(loss):.4f}  load of the experts {shares}", flush=True)


if __name__ == "__main__":
    main()
