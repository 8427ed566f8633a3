"""A GPT-like model of bytes, trained on the Python standard library's own sources, as a pipeline of two stages.

    whale run -np 4 examples/gpt_pipeline.py

Four processes are two stages in two replicas. The plan, the schedule and the perplexity are printed. Started alone, it
trains on one device; the numbers are the same.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

import whale as wh
from whale.ir.plan_text import format_plan

BYTES = 256


def corpus(limit_bytes: int) -> np.ndarray:
    """Sources of the standard library, one after the other, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return np.frombuffer(bytes(text[:limit_bytes]), np.uint8).astype(np.int32)


def batches(text: np.ndarray, rows: int, length: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random windows of the text, and the byte that follows each byte."""
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(len(text) - length - 1, size=rows)
        window = np.stack([text[s : s + length + 1] for s in starts])
        yield window[:, :-1], window[:, 1:]


class Block(tf.keras.layers.Layer):
    """Attention and two dense layers, each behind a normalisation and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        layers = tf.keras.layers
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = [layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.dense[1](self.dense[0](self.norms[1](x)))


class Model(tf.keras.Model):
    """The embedding and the first blocks are one stage, the other blocks and the logits are the next one."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        layers = tf.keras.layers
        self.tokens, self.places = layers.Embedding(BYTES, width), layers.Embedding(length, width)
        self.blocks = [Block(width, 4) for _ in range(blocks)]
        self.norm, self.logits = layers.LayerNormalization(epsilon=1e-5), layers.Dense(BYTES)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        half = len(self.blocks) // 2
        with wh.stage():
            h = self.tokens(x) + self.places(tf.range(x.shape[1]))
            for block in self.blocks[:half]:
                h = block(h)
        with wh.stage():
            for block in self.blocks[half:]:
                h = block(h)
            return self.logits(self.norm(h))


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b", "zb-h1"))
    options = parser.parse_args()

    wh.init({"pipeline.num_micro_batch": options.micro_batches, "pipeline.schedule": options.schedule})
    tf.keras.utils.set_random_seed(1)
    model = Model(options.width, options.blocks, options.length)
    model(tf.zeros((1, options.length), tf.int32))
    optimizer = tf.keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x)))

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    text = corpus(2_000_000)
    held_out = len(text) // 10
    training = batches(text[:-held_out], options.rows, options.length, seed=1)
    check = batches(text[-held_out:], options.rows, options.length, seed=2)
    evaluate = wh.function(loss_of)
    first = wh.rank() == 0
    if first:
        print(f"{len(text):,} bytes of source, {model.count_params():,} parameters, {wh.size()} ranks")
    for number in range(options.steps + 1):
        if number % 20 == 0:
            losses = [float(evaluate(*map(tf.constant, next(check)))) for _ in range(4)]
            if first:
                print(f"step {number:4d}  perplexity {np.exp(np.mean(losses)):7.2f}")
                sys.stdout.flush()
        x, y = map(tf.constant, next(training))
        if number == 0:
            plan = step.plan(x, y)
            if first:
                print(format_plan(plan))
        step(x, y)
    wh.shutdown()


if __name__ == "__main__":
    main()
