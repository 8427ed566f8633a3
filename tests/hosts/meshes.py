"""Script of runs on hosts: steps over a mesh whose tensors are divided first, with a dataset of which ranks read rows.

    meshes.py FOLDER

Rank 0 writes losses, logits of the last batch, and weights to FOLDER/result.npz, and prints in which order ranks lie.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current
from whale.started import process_place

mesh = {"mesh": wh.Mesh(tensor=2, data=2)} if process_place().size > 1 else {}
wh.init(mesh, solo=True)
draw = np.random.default_rng(7)
first = tf.Variable(draw.normal(size=(6, 16)))
second = tf.Variable(draw.normal(size=(16, 4)))
rows = draw.normal(size=(48, 6)), draw.normal(size=(48, 4))
dataset = wh.shard(tf.data.Dataset.from_tensor_slices(rows).batch(12))


@wh.function
def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
        hidden = tf.tanh(x @ first)
        with wh.split():
            logits = hidden @ second
        loss = tf.reduce_mean((logits - y) ** 2)
    for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
        variable.assign_sub(0.1 * gradient)
    return loss, logits


losses, logits = [], None
for x, y in dataset:
    loss, logits = step(x, y)
    losses.append(float(loss))
weights = first.numpy(), second.numpy()
if wh.rank() == 0:
    assert logits is not None
    print("ranks lie", *require_current("the script").rank_order, flush=True)
    np.savez(Path(sys.argv[1]) / "result.npz", losses=losses, logits=logits, first=weights[0], second=weights[1])
wh.shutdown()
