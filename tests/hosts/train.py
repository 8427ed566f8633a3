"""Script of runs on hosts: some steps of a small network, the same on any number of ranks.

    train.py FOLDER [STEPS [PAUSE_S [ROWS WIDTH [PLAN]]]]

PLAN: of `PLANS`; under "rows" each rank reads its rows of a dataset, so that ranks can join. Rank 0 writes losses and
weights to FOLDER/result.npz and says each step; each rank says when it has taken its first one, and adds its process
to FOLDER/pids_HOST.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh

folder, steps, pause_s = Path(sys.argv[1]), int((sys.argv[2:] or ["3"])[0]), float((sys.argv[3:] or ["0"])[0])
rows, width = map(int, sys.argv[4:6] or (8, 16))
# What is configured, and the scopes of the first and of the second layer.
PLANS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "whole": ({}, contextlib.nullcontext, contextlib.nullcontext),
    "replicas": ({}, wh.replica, wh.replica),
    "rows": ({"fault.join": "always"}, wh.replica, wh.replica),
    "zero3": ({"memory.zero": 3, "memory.zero_min_bytes": 1}, wh.replica, wh.replica),
    "stages": ({}, wh.stage, wh.stage),
    "split": ({}, wh.replica, wh.split),
}
plan = sys.argv[6] if sys.argv[6:] else "whole"
settings, first_scope, second_scope = PLANS[plan]
wh.init(settings, solo=True)
draw = np.random.default_rng(7)
first = tf.Variable(draw.normal(size=(6, width)))
second = tf.Variable(draw.normal(size=(width, 1)))
batches = [(draw.normal(size=(rows, 6)), draw.normal(size=(rows, 1))) for _ in range(4)]


@wh.function
def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        with first_scope():
            hidden = tf.tanh(x @ first)
        with second_scope():
            found = hidden @ second
        loss = tf.reduce_mean((found - y) ** 2)
    for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
        variable.assign_sub(0.1 * gradient)
    return loss


order = [batches[number % len(batches)] for number in range(steps)]
data: Iterable[tuple[tf.Tensor, tf.Tensor]] = [(tf.constant(x), tf.constant(y)) for x, y in order]
state = None
if plan == "rows":
    whole = tuple(np.concatenate(parts) for parts in zip(*order))
    state = wh.State(losses=[])
    data = state.rest(wh.shard(tf.data.Dataset.from_tensor_slices(whole).batch(rows)))
losses = state.losses if state is not None else []
begun = False
for x, y in data:
    losses.append(float(step(x, y)))
    if not begun:
        begun = True
        print(f"rank {wh.rank()} has begun", flush=True)
        with open(folder / f"pids_{socket.gethostname()}", "a") as file:
            file.write(f"{os.getpid()}\n")
    if wh.rank() == 0:
        print(f"step {len(losses) - 1}", flush=True)
    time.sleep(pause_s)
values = {"losses": losses, "first": first.numpy(), "second": second.numpy()}  # on all ranks, which hold parts of them
if wh.rank() == 0:
    np.savez(folder / "result.npz", **values)
wh.shutdown()
