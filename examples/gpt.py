"""A GPT of bytes with 3D parallelism: data, tensors and stages at once, trained on Python's own library.

    python examples/gpt.py                                             one process
    whale run -np 4 examples/gpt.py                                    2 stages of 2 ranks, which split tensors
    whale run -np 8 --mesh stage=2,data=2,tensor=2 examples/gpt.py     2 stages, 2 replicas, tensors split 2 ways

The perplexities are the same, however many processes there are.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import tensorflow as tf

import whale as wh

BYTES = 256
layers = tf.keras.layers


class Block(tf.keras.layers.Layer):
    """Attention and two dense layers, whose heads and hidden units are split over ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = [layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        with wh.split():
            h = self.norms[0](x)
            x = x + self.attention(h, h, use_causal_mask=True)
            return x + self.dense[1](self.dense[0](self.norms[1](x)))


class Model(tf.keras.Model):
    """The embedding and the first blocks are one stage, the other blocks and the logits are the next one."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens = layers.Dense(width, use_bias=False)  # of bytes as one-hot vectors: a table with 256 rows
        self.places = self.add_weight(name="places", shape=(length, width), initializer="random_normal")
        self.blocks = [Block(width, 4) for _ in range(blocks)]
        self.norm, self.logits = layers.LayerNormalization(epsilon=1e-5), layers.Dense(BYTES)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        half = len(self.blocks) // 2
        with wh.stage():
            h = self.tokens(tf.one_hot(x, BYTES)) + self.places
            for block in self.blocks[:half]:
                h = block(h)
        with wh.stage():
            for block in self.blocks[half:]:
                h = block(h)
            return self.logits(self.norm(h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    rows, length = 16, 64

    wh.init({"pipeline.micro_batches": 4, "pipeline.schedule": "1f1b"})
    tf.keras.utils.set_random_seed(1)
    model = Model(options.width, options.blocks, length)
    model(tf.zeros((1, length), tf.int32))
    optimizer = tf.keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources)[:1_000_000], np.uint8).astype(np.int32)
    generator = np.random.default_rng(1)  # the same batches on every rank: the batch is the global one
    for number in range(options.steps):
        starts = generator.integers(len(text) - length - 1, size=rows)
        window = np.stack([text[start : start + length + 1] for start in starts])
        loss = float(step(window[:, :-1], window[:, 1:]))
        if wh.rank() == 0 and (number % 20 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {loss:.4f}  perplexity {np.exp(loss):.1f}", flush=True)


if __name__ == "__main__":
    main()
