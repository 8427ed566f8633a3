"""Saves by TensorFlow alone on every rank: files are written once, and read when they are there; Keras warns once."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.helpers import Launcher

SCRIPT = """
import os, tempfile, warnings
import keras, numpy as np, tensorflow as tf, whale as wh
wh.init()
w, x = tf.Variable(np.ones((64, 4))), np.random.default_rng(0).normal(size=(8, 64))

@wh.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    w.assign_sub(0.01 * tape.gradient(loss, w))
    return loss

class Model(tf.Module):
    def __init__(self):
        self.w = w

    @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float64)])
    def __call__(self, x):
        return x @ self.w

    @wh.function
    def half(self, x):
        return x @ self.w / 2

checkpoint = tf.train.Checkpoint(w=w)

def restored(read):
    wanted = w.numpy()
    step(x)
    read()
    np.testing.assert_array_equal(w.numpy(), wanted)

step(x)
for _ in range(3):
    path = checkpoint.save("saved/ckpt")
    written = checkpoint.write("written")
restored(lambda: checkpoint.restore(path))
checkpoint.save("saved/ckpt")
restored(lambda: checkpoint.restore(tf.train.latest_checkpoint("saved")))
checkpoint.write("written")
restored(lambda: checkpoint.read("written"))

manager = tf.train.CheckpointManager(checkpoint, "managed", max_to_keep=2)
for _ in range(4):
    manager.save()
assert len(manager.checkpoints) == 2, manager.checkpoints
restored(tf.train.CheckpointManager(checkpoint, "managed", max_to_keep=2).restore_or_initialize)

own = tempfile.mkdtemp(prefix=f"own{wh.rank()}-", dir=os.getcwd())
checkpoint.save(own + "/ckpt")
restored(lambda: checkpoint.restore(tf.train.latest_checkpoint(own)))
if wh.rank() == 0:
    checkpoint.save("alone/ckpt")
model = Model()
half = model.half(x).numpy()
for _ in range(2):
    tf.saved_model.save(model, "model")
loaded = tf.saved_model.load("model")
np.testing.assert_allclose(loaded(x), x @ w.numpy())
np.testing.assert_allclose(loaded.half(x), half)

layer = keras.layers.Dense(2, input_shape=(3,))
warnings.warn("of the script")
print("equal")
"""


READERS = """
import os, tempfile, time
import numpy as np, tensorflow as tf, whale as wh
wh.init()
w = tf.Variable(np.arange(4.0))
checkpoint, key = tf.train.Checkpoint(w=w), "w/.ATTRIBUTES/VARIABLE_VALUE"

class Model(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.ones([4]))

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def __call__(self, x):
        return x * self.w

@wh.function
def step(x):
    w.assign_add(tf.reduce_sum(x, axis=0))

def save_late(save, *arguments):
    step(tf.ones([3, 4], tf.float64))
    time.sleep(1.0 * (wh.rank() == 0))  # the other rank reads before the first one has begun to write
    return save(*arguments)

for read in (
    lambda path: tf.train.load_checkpoint(path).get_tensor(key),
    lambda path: tf.train.load_variable(path, key),
    lambda path: dict(tf.train.list_variables(path))[key] and tf.train.load_variable(path, key),
    lambda path: tf.train.load_variable(os.path.dirname(path) + "/", key),
    lambda path: tf.compat.v1.train.NewCheckpointReader(path).get_tensor(key),
    lambda path: tf.train.CheckpointView(path).children(0)["w"] and tf.train.load_variable(path, key),
):
    np.testing.assert_array_equal(read(save_late(checkpoint.save, "saved/ckpt")), w.numpy())
own = tempfile.mkdtemp(prefix=f"own{wh.rank()}-", dir=os.getcwd())
np.testing.assert_array_equal(tf.train.load_variable(save_late(checkpoint.write, own + "/ckpt"), key), w.numpy())
save_late(tf.saved_model.save, Model(), "model")
assert tf.saved_model.contains_saved_model("model")
save_late(tf.saved_model.save, Model(), "model2")
assert tf.lite.TFLiteConverter.from_saved_model("model2").convert()
print("equal")
"""


REMOVED = """
import os, tempfile, time
import h5py, keras, numpy as np, tensorflow as tf, whale as wh
from tensorflow.python.ops import io_ops
wh.init()

def late(function):
    def call(*arguments, **named):
        time.sleep(1.0 * wh.rank())  # the first rank has read, and would go on to remove its files
        return function(*arguments, **named)
    return call

io_ops.restore_v2 = late(io_ops.restore_v2)
h5py.File.__init__ = late(h5py.File.__init__)
x, y = np.ones((6, 3)), np.ones((6, 2))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(x, y, verbose=0)
checkpoint = tf.train.Checkpoint(model=model)
wanted = model.get_weights()
for save, read, name in (
    (checkpoint.save, lambda path: checkpoint.restore(path + "-1"), "ckpt"),
    (checkpoint.write, checkpoint.read, "ckpt"),
    (checkpoint.save, lambda path: checkpoint.restore(tf.train.latest_checkpoint(os.path.dirname(path))), "ckpt"),
    (model.save_weights, model.load_weights, "a.weights.h5"),
    (model.save, lambda path: keras.models.load_model(path, compile=False), "a.h5"),
    (lambda path: tf.saved_model.save(model, path), tf.saved_model.load, "a"),
):
    checkpoint.save_counter.assign(0)
    with tempfile.TemporaryDirectory() as folder:
        save(os.path.join(folder, name))
        read(os.path.join(folder, name))
model.save_weights("all.weights.h5")
model.fit(x, y, verbose=0)
model.load_weights("all.weights.h5")
if wh.rank() == 0:
    os.remove("all.weights.h5")
for found, before in zip(model.get_weights(), wanted):
    np.testing.assert_array_equal(found, before)
print("equal")
"""


def test_ranks_save_to_one_place(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2, done.stdout
    assert sorted(p.name for p in (tmp_path / "managed").glob("*.index")) == ["ckpt-7.index", "ckpt-8.index"]
    assert (tmp_path / "alone" / "ckpt-10.index").exists()
    assert done.stderr.count("Do not pass an `input_shape`") == 1, done.stderr
    assert done.stderr.count("UserWarning: of the script") == 2, done.stderr


def test_sharded_variables_are_gathered_for_the_first_rank(launcher: Launcher) -> None:
    launcher.environment |= {"WHALE_MEMORY_ZERO": "3", "WHALE_MEMORY_ZERO_MIN_BYTES": "0"}
    done = launcher.run("-np", "2", launcher.script(SCRIPT.replace("if wh.rank() == 0:", "if True:")), timeout_s=300)
    assert done.returncode == 0, done.stderr


def test_every_way_to_read_waits_for_the_first_rank(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(READERS), timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2, done.stdout


def test_no_rank_removes_what_another_is_reading(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(REMOVED), timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2, done.stdout
