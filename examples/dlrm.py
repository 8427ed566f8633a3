"""Clicks predicted by a model like DLRM: tables of embeddings are split over the ranks, dense layers are copied.

    python examples/dlrm.py
    whale run -np 2 examples/dlrm.py

Every example has four categories, each of many values, and eight numbers. The tables hold nearly all of the weights;
under `wh.split()` they, their gradients and the optimizer's state lie split, and what moves are the rows looked up.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import whale as wh

TABLES, WIDTH, NUMBERS, ROWS = 4, 16, 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--values", type=int, default=2000, help="of each category")
    options = parser.parse_args()

    wh.init()
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    with wh.split():
        tables = [layers.Embedding(options.values, WIDTH) for _ in range(TABLES)]
        for table in tables:
            table.build(())
    bottom = tf.keras.Sequential([layers.Input((NUMBERS,)), layers.Dense(32, "relu"), layers.Dense(WIDTH)])
    pairs = (TABLES + 1) * TABLES // 2
    top = tf.keras.Sequential([layers.Input((WIDTH + pairs,)), layers.Dense(32, "relu"), layers.Dense(1)])
    weights = [v for layer in (*tables, bottom, top) for v in layer.trainable_variables]
    optimizer = tf.keras.optimizers.Adam(1e-2)
    optimizer.build(weights)
    first, second = np.triu_indices(TABLES + 1, 1)

    @wh.function
    def step(categories: tf.Tensor, numbers: tf.Tensor, clicked: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            dense = bottom(numbers)
            with wh.split():
                looked_up = [table(categories[:, i]) for i, table in enumerate(tables)]
            vectors = tf.stack([dense, *looked_up], axis=1)
            products = tf.matmul(vectors, vectors, transpose_b=True)
            near = tf.gather(tf.reshape(products, [-1, (TABLES + 1) ** 2]), first * (TABLES + 1) + second, axis=1)
            logits = top(tf.concat([dense, near], axis=1))[:, 0]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    generator = np.random.default_rng(1)
    liked = generator.normal(size=(TABLES, options.values))  # what a value of a category does to clicks
    for number in range(options.steps):
        # Few values are common, as in life.
        categories = (options.values * generator.random((ROWS, TABLES)) ** 6).astype("int32")
        numbers = generator.normal(size=(ROWS, NUMBERS)).astype("float32")
        score = liked[np.arange(TABLES), categories].sum(axis=1) + numbers[:, 0]
        loss = step(categories, numbers, (score > 0).astype("float32"))
        if wh.rank() == 0 and (number % 40 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
