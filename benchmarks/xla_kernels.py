"""Times arithmetic of models by TensorFlow's kernels, by XLA and by Whale's, forward and with gradients, on one core.

    taskset -c 0 python -m benchmarks.xla_kernels [--only gelu,layernorm]

Microseconds of processor time, medians of interleaved rounds: TensorFlow, TensorFlow with XLA, Whale on one rank, and
Whale with XLA. What XLA is better at, and what it leaves to others, follows from it (decision 0170).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

ROUNDS, CALLS, ROWS, WIDTH = 7, 5, 512, 256
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def list_cases(tf: Any) -> dict[str, Case]:
    """Returns functions and their operands, in float32, by name."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return tf.constant(draw.normal(size=shape).astype(np.float32))

    def normalise(x: Any, scale: Any, offset: Any, axes: Any) -> Any:
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale + offset

    def attend(q: Any, k: Any, v: Any) -> Any:
        return tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.17) @ v

    def turn(x: Any, h: Any, c: Any) -> Any:
        i, f, g, o = tf.split(x + h, 4, -1)
        return tf.sigmoid(o) * tf.tanh(tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g))

    wide, heads = (ROWS, 4 * WIDTH), (8, 8, 64, 32)
    row, channels, image = (WIDTH,), (64,), (8, 32, 32, 64)
    return {
        "layernorm": (partial(normalise, axes=-1), (normal(ROWS, WIDTH), normal(*row), normal(*row))),
        "batchnorm": (partial(normalise, axes=(0, 1, 2)), (normal(*image), normal(*channels), normal(*channels))),
        "gelu": (tf.nn.gelu, (normal(*wide),)),
        "silu": (tf.nn.silu, (normal(*wide),)),
        "arithmetic": (lambda x, y: (x * y + x) * (x - y) * 0.5 + y * y, (normal(*wide), normal(*wide))),
        "log_softmax": (tf.nn.log_softmax, (normal(ROWS, 8192),)),
        "lstm_cell": (turn, (normal(16, 4 * WIDTH), normal(16, 4 * WIDTH), normal(16, WIDTH))),
        "product": (tf.matmul, (normal(ROWS, WIDTH), normal(WIDTH, 4 * WIDTH))),
        "attention": (attend, (normal(*heads), normal(*heads), normal(*heads))),
    }


def with_gradient(tf: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the gradient of the sum of the results' squares."""

    def gradient(*operands: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(operands)
            loss = tf.reduce_sum(tf.square(function(*operands)))
        return tape.gradient(loss, operands)

    return gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    wanted = [name for name in parser.parse_args().only.split(",") if name]
    import tensorflow as tf

    import whale as wh

    tf.config.threading.set_intra_op_parallelism_threads(1)
    wh.init({"communication.in_process_ranks": 1})
    print(f"{'us':<22}{'TensorFlow':>12}{'with XLA':>12}{'Whale':>12}{'with XLA':>12}")
    for name, (function, operands) in list_cases(tf).items():
        if wanted and name not in wanted:
            continue
        for what, body in ((name, function), (f"{name}, gradient", with_gradient(tf, function))):
            made = [wrap(body, jit_compile=jit) for wrap in (tf.function, wh.function) for jit in (None, True)]
            samples: list[list[float]] = [[] for _ in made]
            for number in range(-1, ROUNDS):
                for step, found in zip(made, samples):
                    start_s = time.process_time()
                    for _ in range(CALLS):
                        step(*operands)
                    if number >= 0:
                        found.append((time.process_time() - start_s) / CALLS)
            print(f"{what:<22}" + "".join(f"{1e6 * statistics.median(found):>12.0f}" for found in samples), flush=True)
    wh.shutdown()


if __name__ == "__main__":
    main()
