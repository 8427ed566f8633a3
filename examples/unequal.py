"""Ranks of unequal speed: every rank gets as many rows as it can compute while the others compute theirs.

    whale run -np 2 --threads 1 examples/unequal.py

The last rank shares its core with another program, so it has half of a core. The same steps are run with equal shares,
then as `auto_parallel` spreads them, which measures the ranks first. The losses are the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

import whale as wh
from whale.ir.plan_text import format_plan


def train(automatic: bool, width: int, rows: int, steps: int) -> None:
    """Some steps of a few dense layers, with equal shares or as it is found to be fastest."""
    wh.init({"mesh.auto_parallel": automatic})
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((width,)), *(tf.keras.layers.Dense(width) for _ in range(4))])
    optimizer = tf.keras.optimizers.SGD(0.1)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    x = np.random.default_rng(1).normal(size=(rows, width)).astype("float32")
    taken_s, losses = [], []
    for _ in range(steps + 1):
        start_s = time.perf_counter()
        losses.append(float(step(x)))
        taken_s.append(time.perf_counter() - start_s)
    plan = step.plan(x)
    if wh.rank() == 0:
        shares = next(line.split()[1] for line in format_plan(plan).splitlines() if line.startswith("  x "))
        how = "planned" if automatic else "equal shares"
        print(
            f"{how:13} rows {shares:16} {1e3 * statistics.median(taken_s[1:]):6.1f} ms a step, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
            flush=True,
        )
    wh.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    rank, size = int(os.environ.get("WHALE_RANK", "0")), int(os.environ.get("WHALE_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * len(cores) // size]})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if rank == size - 1 else None
    try:
        for automatic in (False, True):
            train(automatic, options.width, options.rows, options.steps)
    finally:
        if other is not None:
            other.kill()


if __name__ == "__main__":
    main()
