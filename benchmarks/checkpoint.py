"""How long saving holds training up: run with `whale run -np 2 benchmarks/checkpoint.py FOLDER`.

Weights and Adam's slots (--megabytes) lie split over the ranks (memory.zero=3). Rank 0 prints, medians of --times:
    copy        a copy of what this rank holds, in memory
    saving      `save` of a manager that waits until the files are there
    pause       `save` of an asynchronous manager, and what the next step takes longer than others
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import whale as wh

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", help="for the checkpoints; they are removed again")
parser.add_argument("--megabytes", type=int, default=768)
parser.add_argument("--times", type=int, default=5)
options = parser.parse_args()

WIDTH = 2048
wh.init({"memory.zero": 3})
layers = [
    tf.keras.layers.Dense(WIDTH, use_bias=False) for _ in range(max(1, options.megabytes // (12 * WIDTH**2 >> 20)))
]
for layer in layers:
    layer.build((None, WIDTH))
weights = [layer.kernel for layer in layers]
optimizer = tf.keras.optimizers.Adam(1e-4)
optimizer.build(weights)


@wh.function
def step(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = x
        for layer in layers:
            loss = layer(loss)
        loss = tf.reduce_mean(tf.square(loss))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss


def seconds(do: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    do()
    return time.perf_counter() - start_s


def median(do: Callable[[], float]) -> float:
    return statistics.median(do() for _ in range(options.times))


def run_step() -> float:
    return float(step(x))


x = tf.ones((8, WIDTH))
run_step()
step_s = median(lambda: seconds(run_step))
held_bytes = wh.memory_report().variable_bytes
copy_s = median(lambda: seconds(np.ones(held_bytes // 4, np.float32).copy))
state = tf.train.Checkpoint(weights=weights, optimizer=optimizer)
waiting = wh.CheckpointManager(state, f"{options.folder}/waiting", max_to_keep=1)
save_s = median(lambda: seconds(waiting.save))
beside = wh.CheckpointManager(state, f"{options.folder}/beside", max_to_keep=1, asynchronous=True)
pauses_s, steps_s, writes_s = [], [], []
for _ in range(options.times):
    start_s = time.perf_counter()
    pauses_s.append(seconds(beside.save))
    steps_s.append(seconds(run_step))
    beside.wait()
    writes_s.append(time.perf_counter() - start_s)
    run_step()
pause_s, longer_s = statistics.median(pauses_s), max(0.0, statistics.median(steps_s) - step_s)
if wh.rank() == 0:
    print(
        f"{held_bytes / 1e6:.0f} MB on this rank: a copy of them in memory takes {copy_s:.3f} s, a step {step_s:.3f} s"
    )
    print(f"saving, and waiting for it: {save_s:.3f} s")
    print(
        f"saving beside the steps: {pause_s:.3f} s until `save` returns, {pause_s / copy_s:.2f} of the copy;"
        f" the next step takes {longer_s:.3f} s longer, as it copies and shares the processors with the writing;"
        f" on the disk after {statistics.median(writes_s):.3f} s"
    )
    shutil.rmtree(options.folder)
