"""Script of runs on hosts: some steps of a small network, the same on any number of ranks.

    train.py FOLDER [STEPS [PAUSE_S [ROWS WIDTH]]]

Rank 0 writes losses and weights to FOLDER/result.npz and says each step; each rank says when it has taken its first
one, and adds its process to FOLDER/pids_HOST.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import whale as wh

folder, steps, pause_s = Path(sys.argv[1]), int((sys.argv[2:] or ["3"])[0]), float((sys.argv[3:] or ["0"])[0])
rows, width = map(int, sys.argv[4:] or (8, 16))
wh.init(solo=True)
draw = np.random.default_rng(7)
first = tf.Variable(draw.normal(size=(6, width)))
second = tf.Variable(draw.normal(size=(width, 1)))
batches = [(draw.normal(size=(rows, 6)), draw.normal(size=(rows, 1))) for _ in range(4)]


@wh.function
def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.tanh(x @ first) @ second - y) ** 2)
    for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
        variable.assign_sub(0.1 * gradient)
    return loss


losses = []
for number in range(steps):
    losses.append(float(step(*map(tf.constant, batches[number % len(batches)]))))
    if number == 0:
        print(f"rank {wh.rank()} has begun", flush=True)
        with open(folder / f"pids_{socket.gethostname()}", "a") as file:
            file.write(f"{os.getpid()}\n")
    if wh.rank() == 0:
        print(f"step {number}", flush=True)
    time.sleep(pause_s)
if wh.rank() == 0:
    np.savez(folder / "result.npz", losses=losses, first=first.numpy(), second=second.numpy())
wh.shutdown()
