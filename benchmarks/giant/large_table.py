"""``whale run -np 4 benchmarks/giant/large_table.py --gib 12 --folder FOLDER``: a table that lies in files.

Trains bags of ids that follow Zipf's law, and prints the slowest step's seconds, and of each rank the memory that no
file has (what a rank needs) and what was written to the disk.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import zipf

BATCH, EACH, WIDTH = 4096, 8, 64
HOT = 1 << 20  # ids are drawn among as many, and spread over the table


def optimizer(name: str) -> Any:
    """SGD, or a lazy one of Keras."""
    kinds = {"adam": tf.keras.optimizers.Adam, "adagrad": tf.keras.optimizers.Adagrad, "ftrl": tf.keras.optimizers.Ftrl}
    if name == "row-wise":
        return wh.optimizers.RowWiseAdagrad(0.01)
    return tf.keras.optimizers.SGD(0.01) if name == "sgd" else wh.optimizers.lazy(kinds[name](0.01))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=12.0, help="size of the table")
    parser.add_argument("--folder", default=None, help="where it lies in files; without, in memory")
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adam", "adagrad", "ftrl", "row-wise"])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    wh.init()
    rows = int(given.gib * 2**30) // (WIDTH * 4)
    by = "rows" if given.optimizer == "sgd" else "columns"
    layer = wh.layers.Embedding(rows, WIDTH, "mean", sharded=by, folder=given.folder, embeddings_initializer="zeros")
    layer.build()
    out = tf.Variable(tf.ones((WIDTH, 1)))
    variables = [layer.embeddings, out]
    steps = optimizer(given.optimizer)
    steps.build(variables)

    def train(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(ids) @ out - 1.0))
        steps.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    step = wh.function(train)
    seconds, losses = [], []
    for number in range(given.steps):
        draw = np.random.default_rng(number)
        ids = zipf(draw, HOT, BATCH * EACH).reshape(BATCH, EACH) * (rows // HOT)
        start_s = time.perf_counter()
        losses.append(float(step(tf.constant(ids))))
        seconds.append(time.perf_counter() - start_s)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    written = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["write_bytes"]
    anonymous, shared, of_files = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem", "RssFile"))
    print(
        f"rank {wh.rank()}: {rows:,} rows, {given.optimizer}; loss {losses[0]:.4f} to {losses[-1]:.4f}; "
        f"median step {1e3 * float(np.median(seconds[2:])):.0f} ms; memory {anonymous + shared:.0f} MiB, "
        f"of files {of_files:.0f} MiB; written {int(written) / 2**20:.0f} MiB",
        flush=True,
    )
    wh.shutdown()


if __name__ == "__main__":
    main()
