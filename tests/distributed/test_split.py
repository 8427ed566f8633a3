"""Variables that lie split over processes: read, assigned, saved and restored whole, by all ranks or none."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import os, sys
import numpy as np
import tensorflow as tf
import whale as wh
from whale.errors import CommError

wh.init()
dense = tf.keras.layers.Dense(7)
dense.build((None, 4))
value = np.arange(28.0, dtype=np.float32).reshape(4, 7) / 28
dense.set_weights([value, np.zeros(7)])

@wh.function
def step(x):
    with wh.split(), tf.GradientTape() as tape:
        loss = tf.reduce_mean(dense(x) ** 2)
    (slope,) = tape.gradient(loss, [dense.kernel])
    dense.kernel.assign_sub(0.5 * slope)
    return loss

x = np.eye(4, dtype=np.float32)
assert set(step.plan(x).variables) and step.plan(x).split_flops_fraction == 1.0
first = float(step(x))

with wh.split():
    born = [tf.keras.layers.Dense(64, use_bias=False, kernel_initializer=i) for i in ("glorot_uniform", "orthogonal")]
    for layer in born:
        layer.build((None, 64))
kernels = [layer.kernel_initializer((64, 64)) for layer in born]

@wh.function
def product(x):
    with wh.split():
        return born[1](born[0](x))

product(np.eye(64, dtype=np.float32))
for layer, kernel in zip(born, kernels):
    parts = getattr(layer.kernel, "value", layer.kernel)._whale_parts
    assert next(iter(parts._parts.values())).shape.num_elements() == 64 * 32
    np.testing.assert_array_equal(layer.kernel, kernel)

expected = value - 0.5 * 2 * value / 28
np.testing.assert_allclose(dense.get_weights()[0], expected, rtol=1e-6)
"""

SAVED = (
    SCRIPT
    + """
folder = sys.argv[1]
manager = wh.CheckpointManager(tf.train.Checkpoint(dense=dense), folder, max_to_keep=1)
manager.save()
second = float(step(x))
dense.kernel.assign(value)
assert float(step(x)) == first
manager.restore_or_initialize()
np.testing.assert_allclose(dense.get_weights()[0], expected, rtol=1e-6)
assert float(step(x)) == second

kernel = getattr(dense.kernel, "value", dense.kernel)
expected = kernel.numpy()
expected[1:3] = value[:2]
expected[0] -= 1.0
kernel[1:3].assign(value[:2])
tf.raw_ops.ResourceScatterSub(resource=kernel.handle, indices=[0], updates=tf.ones((1, 7)))
total = tf.function(lambda: tf.reduce_sum(kernel))
np.testing.assert_allclose(total(), expected.sum(), rtol=1e-6)
step(0 * x)
np.testing.assert_array_equal(kernel.numpy(), expected)
wh.shutdown()
for read in (total, kernel.numpy):
    try:
        read()
    except CommError as error:
        assert "next: read or save variables before wh.shutdown()" in str(error), error
    else:
        raise AssertionError("a part of a variable was taken for all of it")
print("done")
"""
)

ALONE = (
    SCRIPT
    + """
if wh.rank() == 1:
    dense.kernel.numpy()
step(x)
"""
)


def test_global_values_are_read_assigned_saved_and_restored(launcher: Launcher) -> None:
    folder = launcher.folder / "checkpoints"
    done = launcher.run("-np", "2", launcher.script(SAVED), str(folder), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2


def test_a_rank_that_reads_alone_is_told(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(ALONE), timeout_s=120)
    assert done.returncode != 0
    assert "which is sharded over the ranks (every rank has to read it)" in done.stderr + done.stdout
