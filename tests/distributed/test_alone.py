"""Runs of several ranks that train, and of which Whale distributes nothing, say so, and what trained."""

from __future__ import annotations

import subprocess

import pytest

from tests.launcher.helpers import Launcher

# What trains is gone when the script ends.
TRAINS = """
import sys
import numpy as np, tensorflow as tf, whale as wh

w = tf.Variable(np.full((3, 1), 0.5, np.float32), name="w")
x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)

def descend(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss

def in_a_function():
    step = tf.function(descend)
    step(x, y)
    assert float(step(x, y)) < 1.0

def in_a_session():
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", [3, 1])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, v) - y))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with type("Own", (tf.compat.v1.Session,), {})() as session:  # a class of the script
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train)

def in_a_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        u = tf.Variable(np.ones((3, 1), np.float32), name="u")
        tf.function(lambda: u.assign(0.9 * u))()

def by_an_optimizer():
    import keras
    k = keras.Variable(np.ones((3, 1), np.float32), name="k")
    keras.optimizers.SGD(0.1).apply([tf.ones([3, 1])], [k])

def in_another_thread():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    @tf.function
    def in_strategy():
        strategy.run(descend, (x, y))
    in_strategy()

def by_keras_in_a_function():
    import keras
    model, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1)
    @tf.function
    def train_dense():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    train_dense()
"""


def run(launcher: Launcher, text: str) -> subprocess.CompletedProcess[str]:
    return launcher.run("-np", "2", launcher.script(TRAINS + text), timeout_s=600)


def test_every_way_of_training_alone_is_named(launcher: Launcher) -> None:
    done = run(
        launcher,
        """
wh.init()
in_a_function(), in_a_session(), in_a_strategy(), descend(x, y), by_an_optimizer()
wh.shutdown()
print("the end")
""",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.count("the end") == 2
    lines = TRAINS.splitlines()
    for fact in (
        "Whale has distributed nothing: each of the 2 ranks has trained alone",
        f"the tf.function `descend`, called at script.py:{lines.index('    step(x, y)') + 1} (w)",
        f"a Own run at script.py:{lines.index('            session.run(train)') + 1} (v)",
        "called at script.py",
        "under MirroredStrategy (u)",
        f"updates at script.py:{lines.index('    w.assign_sub(0.1 * tape.gradient(loss, w))') + 1} (w)",
        f"updates at script.py:{lines.index('    keras.optimizers.SGD(0.1).apply([tf.ones([3, 1])], [k])') + 1} (",
        "wh.init(solo=True)",
    ):
        assert fact in done.stderr, (fact, done.stderr)


def test_functions_are_named_that_run_elsewhere_or_make_variables(launcher: Launcher) -> None:
    done = run(launcher, "wh.init()\nin_another_thread(), by_keras_in_a_function()\n")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the tf.function `in_strategy`, under MirroredStrategy (w)" in done.stderr, done.stderr
    assert "the tf.function `train_dense`, called at script.py" in done.stderr, done.stderr
    assert "initialize_variables" not in done.stderr


@pytest.mark.parametrize(
    "gradients",
    [
        "wh.function(lambda x, y: slopes(lambda: loss(forward(x), y)))(x, y)",
        "slopes(lambda: loss(wh.function(forward)(x), y))",
        "wh.function(lambda ids: slopes(lambda: tf.reduce_sum(tf.gather(w, ids))))(tf.constant([1] * 8))",
    ],
)
def test_steps_whose_gradients_the_script_applies_are_distributed(launcher: Launcher, gradients: str) -> None:
    done = run(
        launcher,
        f"""
wh.init()
forward = lambda x: tf.matmul(x, w)
loss = lambda z, y: tf.reduce_mean(tf.square(z - y))

def slopes(compute):
    with tf.GradientTape() as tape:
        found = compute()
    return tape.gradient(found, w)

for _ in range(4):
    w.assign_sub(0.1 * tf.convert_to_tensor({gradients}))
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alone" not in done.stderr


def test_who_wants_to_train_alone_may(launcher: Launcher) -> None:
    done = run(
        launcher,
        """
import keras
wh.init(solo=True)
in_a_function()
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
if wh.rank():
    in_a_function()
    model.fit(x, y, verbose=0)
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alone" not in done.stderr
    assert "variables differ" not in done.stderr


def test_nothing_trained_is_nothing_to_complain_of(launcher: Launcher) -> None:
    done = run(
        launcher,
        """
wh.init()
w.assign(2.0 * w)
total = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, w)))
print(float(total(x)))
evaluate = wh.function(lambda x: tf.reduce_sum(tf.matmul(x, w)))
print(float(evaluate(x)))
for value in range(5):  # as of checkpoints that are evaluated
    w.assign(tf.fill([3, 1], float(value)))
    evaluate(x)
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("24.0") == 4
    assert "alone" not in done.stderr


def test_a_script_that_never_starts_whale_is_warned_of(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script("print(1)"), timeout_s=600)
    assert done.returncode == 0
    assert "warning: the script never called wh.init(): each of the 2 ranks has run all of it alone" in done.stderr


def test_scopes_of_a_script_that_never_starts_whale_are_an_error(launcher: Launcher) -> None:
    file = launcher.folder / "scopes.json"
    file.write_text('{"dense": {"split": {}}}')
    done = launcher.run("-np", "2", "--annotate", str(file), launcher.script("print(1)"), timeout_s=600)
    assert done.returncode == 2, done.stderr
    assert f"without effect of WHALE_MESH_ANNOTATIONS={file}; call wh.init() at the script's beginning" in done.stderr
