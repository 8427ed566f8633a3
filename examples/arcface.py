"""Recognition of many identities with ArcFace: the classes' weights are split, and no rank sees all logits.

    python examples/arcface.py
    whale run -np 2 examples/arcface.py

Each identity is a random vector, and a picture of it that vector with noise. At the end pictures are compared by the
angle between their features.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import whale as wh

SIZE, WIDTH, ROWS = 64, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--identities", type=int, default=1000)
    options = parser.parse_args()

    wh.init()
    tf.keras.utils.set_random_seed(1)
    backbone = tf.keras.Sequential(
        [tf.keras.layers.Input((SIZE,)), tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(WIDTH)]
    )
    start = np.random.default_rng(2).normal(scale=0.1, size=(WIDTH, options.identities))
    with wh.split():
        classes = tf.Variable(start.astype("float32"), name="classes")
    weights = [*backbone.trainable_variables, classes]
    optimizer = tf.keras.optimizers.Adam(2e-3)
    optimizer.build(weights)

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with wh.replica():
                features = backbone(x)
            with wh.split():
                loss = tf.reduce_mean(wh.losses.arcface(features, classes, y, margin=0.2, scale=16.0))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    @wh.function
    def features_of(x: tf.Tensor) -> tf.Tensor:
        return tf.math.l2_normalize(backbone(x), axis=1)

    generator = np.random.default_rng(1)
    faces = generator.normal(size=(options.identities, SIZE))

    def pictures(who: np.ndarray) -> np.ndarray:
        return (faces[who] + 0.5 * generator.normal(size=(len(who), SIZE))).astype("float32")

    for number in range(options.steps):
        who = generator.integers(options.identities, size=ROWS).astype("int32")
        loss = step(pictures(who), who)
        if wh.rank() == 0 and (number % 50 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {float(loss):.4f}", flush=True)
    one, other = generator.permutation(options.identities)[: 2 * ROWS].reshape(2, ROWS)
    a, b, c = (np.asarray(features_of(pictures(who))) for who in (one, one, other))
    if wh.rank() == 0:
        same, different = (a * b).sum(axis=1), (a * c).sum(axis=1)
        print(f"cosine of two pictures of one identity {same.mean():.2f}, of two identities {different.mean():.2f}")


if __name__ == "__main__":
    main()
