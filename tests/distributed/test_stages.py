"""Variables of stages over processes: a rank holds those of its own; all ranks read, save and restore them."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.helpers import Launcher

SCRIPT = """
import contextlib, sys
import numpy as np
import tensorflow as tf
import whale as wh
from whale.runtime.variables.deferred import find_deferred
from whale_ops.memory import read_memory

WIDTH = 256
ONE = 8 * WIDTH * WIDTH  # bytes of a kernel

class Net:
    def __init__(self, stage):
        self.stage = stage
        self.free = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (3, i), dtype=tf.float64) * 0.05)
                     for i in range(2)]
        self.layers = []
        for seed in range(2):
            with stage():
                initializer = tf.keras.initializers.GlorotUniform(seed)
                layer = tf.keras.layers.Dense(WIDTH, use_bias=False, dtype="float64", kernel_initializer=initializer)
                layer.build((None, WIDTH))
            self.layers.append(layer)
        self.kernels = [tf_variable(layer.kernel) for layer in self.layers]
        self.optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build([*(layer.kernel for layer in self.layers)])
        self.slots = [tf_variable(v) for v in self.optimizer.variables if tuple(v.shape) == (WIDTH, WIDTH)]

    def loss(self, x):
        for layer, free in zip(self.layers, self.free):
            with self.stage():
                x = tf.tanh(layer(x)) + x @ free
        return tf.reduce_mean(x ** 2)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        slopes = tape.gradient(loss, [*self.kernels, *self.free])
        self.optimizer.apply_gradients(zip(slopes[:2], [layer.kernel for layer in self.layers]))
        for free, slope in zip(self.free, slopes[2:]):
            free.assign_sub(0.1 * slope)
        return loss

def tf_variable(v):
    return v if isinstance(v, tf.Variable) else v.value

def elements(v):
    held = tf.raw_ops.ReadVariableOp(resource=vars(v)["_handle"], dtype=v.dtype)  # one NaN where there is nothing
    return int(tf.size(held)) * (held.shape == v.shape)

def values(net):
    return [v.numpy() for v in (*net.kernels, *net.slots, *net.free)]

x = tf.constant(np.random.default_rng(0).standard_normal((8, WIDTH)))
alone = Net(contextlib.nullcontext)
alone_step = tf.function(alone.step)
wanted = [alone_step(x).numpy() for _ in range(4)]
expected = values(alone)

wh.init()
rank = wh.rank()
before = read_memory().live_bytes
net = Net(wh.stage)
assert all(find_deferred(v) is not None for v in (*net.kernels, *net.slots))
assert read_memory().live_bytes - before == 2 * ONE  # what was created under no scope, before any
step = wh.function(net.step)
assert len(step.plan(x).stage_groups) == 2

def holds_its_own():
    for mine in (net.kernels, net.slots):
        assert [elements(v) for v in mine] == [WIDTH * WIDTH * (s == rank) for s in range(2)]

holds_its_own()
assert read_memory().live_bytes - before == 4 * ONE
assert wh.memory_report().variables["parameters"] == 3 * ONE
found = [step(x).numpy() for _ in range(2)]
holds_its_own()
assert [elements(v) for v in net.free] == [WIDTH * WIDTH * (s == rank) for s in range(2)]
assert read_memory().live_bytes - before == 3 * ONE
"""

TRAINED = (
    SCRIPT
    + """
manager = wh.CheckpointManager(tf.train.Checkpoint(net=net.layers, free=net.free, slots=net.slots), sys.argv[1], 1)
path = manager.save()
holds_its_own()
saved = values(net)
reader = tf.train.load_checkpoint(path)
for name, value in (("net/1/_kernel", saved[1]), ("slots/0", saved[2]), ("free/1", saved[5])):
    np.testing.assert_array_equal(reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE"), value)
found += [step(x).numpy() for _ in range(2)]
holds_its_own()
np.testing.assert_allclose(found, wanted, rtol=1e-12)
for a, b in zip(values(net), expected):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
step(x)
for v in net.kernels:
    v.assign_add(tf.ones(v.shape, v.dtype))
manager.restore(path)
np.testing.assert_allclose(step(x), wanted[2], rtol=1e-12)
holds_its_own()
manager.restore(path)
for a, b in zip(values(net), saved):
    np.testing.assert_array_equal(a, b)
step(x)
wh.check_replicas()
model = tf.Module()
model.net, model.loss = net.kernels + net.free, tf.function(net.loss, input_signature=[tf.TensorSpec(x.shape, x.dtype)])
net.stage = contextlib.nullcontext
wh.export(model, sys.argv[2])
if rank == 0:
    loaded = tf.saved_model.load(sys.argv[2])
    np.testing.assert_allclose(loaded.loss(x), wanted[3], rtol=1e-12)
"""
)


def test_a_rank_holds_the_variables_of_its_stage_only(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINED)
    # Bytes held are counted by the allocator of these kernels, which TensorFlow leaves off on older processors.
    launcher.environment["TF_ENABLE_ONEDNN_OPTS"] = "1"
    done = launcher.run("-np", "2", "script.py", str(tmp_path / "saved"), str(tmp_path / "exported"), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
