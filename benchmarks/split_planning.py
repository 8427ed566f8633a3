"""Processor seconds in which a model under `wh.split` is planned, beside those of tracing its step.

    python -m benchmarks.split_planning [--models bert t5 t5-keras2] [--ranks 2] [--repeats 3]

All layers of the model are in one `wh.split`, trained by Adam. `bert` is an encoder of 12 layers of Keras 3; `t5` has
2 layers of encoder and 2 of decoder of Keras 3, with relative positions as a bias of the scores, RMS normalisation and
attention to the encoder, written out in products and with shapes that are computed, as Hugging Face writes it;
`t5-keras2` is the same of Keras 2. Planning is from the captured program to the plan. The
least of the repeats counts. Ends with status 1 when planning takes more than 3 s.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
import tf_keras

import whale as wh
from benchmarks.steps import train_step
from whale.capture.function import trace_function
from whale.ir.program import Program
from whale.partition.lower import make_any_plan
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings

_MOST_S = 3.0
_WIDTH, _HEADS, _LENGTH, _WORDS, _ROWS = 64, 4, 16, 512, 8
_BUCKETS = 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_planning", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS), metavar="MODEL")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    wh.init({})
    most_s = 0.0
    for name in options.models:
        program, traced_s = captured(MODELS[name]())
        settings = PlanSettings(options.ranks)
        times_s = [planned(program, settings) for _ in range(options.repeats)]
        normalise_s, plan_s = min(times_s, key=sum)
        most_s = max(most_s, normalise_s + plan_s)
        print(
            f"{name:10s} {len(program.nodes):6d} operations: {normalise_s + plan_s:5.2f} s of processor time to plan "
            f"(normalise {normalise_s:.2f}, plan {plan_s:.2f}), beside {traced_s:.2f} s of tracing",
            flush=True,
        )
    wh.shutdown()
    return int(most_s > _MOST_S)


def captured(model: Callable[..., tf.Tensor]) -> tuple[Program, float]:
    """The program of a training step, and the processor seconds of tracing it."""
    words = tf.zeros((_ROWS, _LENGTH), tf.int32)

    def step(words: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with wh.split():
            return train(words, following)

    optimizers = tf_keras.optimizers if isinstance(model, tf_keras.Model) else keras.optimizers
    train = train_step(model, optimizers.Adam(1e-4))
    start_s = time.process_time()
    trace = trace_function(step, (words, words))
    traced_s = time.process_time() - start_s
    return trace.read().program, traced_s


def planned(program: Program, settings: PlanSettings) -> tuple[float, float]:
    """Processor seconds of bringing a program into its normal form, and of planning it."""
    start_s = time.process_time()
    normalised = normalise(program, settings)
    between_s = time.process_time()
    make_any_plan(normalised, settings)
    return between_s - start_s, time.process_time() - between_s


def bert() -> Any:
    words = keras.Input((_LENGTH,), dtype="int32")
    x = keras.layers.Embedding(_WORDS, _WIDTH)(words)
    for _ in range(12):
        attention = keras.layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS, dropout=0.1)(x, x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attention))
        hidden = keras.layers.Dense(4 * _WIDTH, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(keras.layers.Dense(_WIDTH)(hidden)))
    return keras.Model(words, keras.layers.Dense(_WORDS)(x))


def t5(k: Any) -> Any:
    """2 + 2 layers of a T5, of the layers of ``k``, which is Keras 3 or Keras 2."""

    class Norm(k.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(_WIDTH,), initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.scale * x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6)

    class Attention(k.layers.Layer):  # type: ignore[misc]
        def __init__(self, causal: bool, biased: bool) -> None:
            super().__init__()
            self.causal, self.norm, self.drop = causal, Norm(), k.layers.Dropout(0.1)
            self.made = [k.layers.Dense(_WIDTH, use_bias=False) for _ in range(4)]
            self.bias = k.layers.Embedding(_BUCKETS, _HEADS) if biased else None

        def call(self, x: tf.Tensor, other: Any = None, training: bool = False) -> tf.Tensor:
            normed = self.norm(x)
            read = normed if other is None else other
            q, key, value = (self.heads(make(of)) for make, of in zip(self.made, (normed, read, read)))
            scores = tf.matmul(q, key, transpose_b=True)
            if self.bias is not None:
                apart = tf.range(tf.shape(x)[1])[None, :] - tf.range(tf.shape(x)[1])[:, None]
                bias = self.bias(tf.clip_by_value(apart + _BUCKETS // 2, 0, _BUCKETS - 1))
                scores += tf.transpose(bias, [2, 0, 1])[None]
                if self.causal:
                    scores += tf.cast(apart > 0, tf.float32) * -1e9
            found = tf.matmul(self.drop(tf.nn.softmax(scores), training=training), value)
            found = tf.reshape(tf.transpose(found, [0, 2, 1, 3]), [tf.shape(x)[0], -1, _WIDTH])
            return x + self.drop(self.made[3](found), training=training)

        def heads(self, x: tf.Tensor) -> tf.Tensor:
            shape = [tf.shape(x)[0], -1, _HEADS, _WIDTH // _HEADS]
            return tf.transpose(tf.reshape(x, shape), [0, 2, 1, 3])

    class Hidden(k.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = Norm(), k.layers.Dropout(0.1)
            self.up = k.layers.Dense(4 * _WIDTH, use_bias=False, activation="relu")
            self.down = k.layers.Dense(_WIDTH, use_bias=False)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            hidden = self.drop(self.up(self.norm(x)), training=training)
            return x + self.drop(self.down(hidden), training=training)

    words = k.Input((_LENGTH,), dtype="int32")
    x = y = k.layers.Embedding(_WORDS, _WIDTH)(words)
    for i in range(2):
        x = Hidden()(Attention(causal=False, biased=i == 0)(x))
    x = Norm()(x)
    for i in range(2):
        y = Hidden()(Attention(causal=False, biased=False)(Attention(causal=True, biased=i == 0)(y), x))
    return k.Model(words, k.layers.Dense(_WORDS, use_bias=False)(Norm()(y)))


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "t5": lambda: t5(keras), "t5-keras2": lambda: t5(tf_keras)}

if __name__ == "__main__":
    sys.exit(main())
