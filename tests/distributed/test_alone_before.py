"""What one rank alone did before a step, and what ranks measure for a time, changes nothing about the program."""

from __future__ import annotations

import pytest

from tests.launcher.helpers import Launcher

STEPS = """
import numpy as np, tensorflow as tf, whale as wh

rows = np.random.default_rng(0).random((8, 5))
x, ids, y = rows.astype(np.float32), (rows * 9).astype(np.int32), rows[:, :1].astype(np.float32)

def model(function, table, kernel):
    def forward(x, ids):
        h = tf.matmul(x, kernel) + tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)
        count = 0
        while tf.reduce_sum(h) < 100.0:
            h, count = h * 2.0, count + 1
        return h + tf.numpy_function(np.negative, [0.5], tf.float32)

    @function
    def train(x, ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(forward(x, ids), 1, keepdims=True) - y) ** 2)
        table_slope, slope = tape.gradient(loss, [table, kernel])
        kernel.assign_sub(1e-6 * slope)
        table.scatter_sub(tf.IndexedSlices(1e-6 * table_slope.values, table_slope.indices))
        return loss

    return train, function(lambda x, ids: tf.reduce_sum(forward(x, ids)))

def steps(function):
    start = np.random.default_rng(1).random((10, 4)).astype(np.float32)
    train, evaluate = model(function, tf.Variable(start), tf.Variable(start[:5]))
    return [[float(train(x, ids, y)), float(evaluate(x, ids))] for _ in range(2)]

wh.init({"mesh.auto_parallel": True})
if wh.rank() == 0:
    for i in range(99):
        tf.constant(1.0) + tf.constant(2.0)
    tf.function(lambda: tf.numpy_function(np.negative, [tf.constant(1.0)], tf.float32))()
found = steps(wh.function)
np.testing.assert_allclose(found, steps(tf.function), rtol=1e-4)
print("rank", wh.rank(), "losses fell" if found[1][0] < found[0][0] else found)
"""


@pytest.mark.core
def test_the_ranks_run_equal_programs(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(STEPS), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} losses fell" in done.stdout for rank in range(2)), done.stdout
