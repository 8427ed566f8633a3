"""Mistakes of a user, with real processes: each ends soon, says what is wrong and what to do, and leaves nothing."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.launcher.helpers import PATIENT, Launcher

# A step over the weights `w` of a linear model; the batch has 8 rows.
STEP = """
import sys, time
import numpy as np, tensorflow as tf, whale as wh

x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
w = tf.Variable(np.full((3, 1), 0.5, np.float32), name="w")

def descend(x, y, factor=1.0):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y)) * factor
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss
"""


def fails(launcher: Launcher, text: str, size: int = 2) -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs the script, which must fail soon, which is: because the mistake is seen, and not because a time ran out.

    Returns its end and all that was printed.
    """
    launcher.environment["WHALE_DEBUG_CHECK_TIMEOUT_S"] = "3600"  # unless the script sets it
    done = launcher.run("-np", str(size), launcher.script(text), timeout_s=600)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "went on" not in said, said
    return done, said


@pytest.mark.core
def test_programs_that_differ_between_ranks(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init()
step = wh.function(lambda x, y: descend(x, y, 2.0 if wh.rank() == 1 else 1.0))
step(x, y)
print("went on")
""",
    )
    assert "ProgramError" in said
    assert "rank 1" in said
    assert re.search(r"first difference: node \S+", said), said
    assert "next:" in said


def test_programs_that_differ_on_the_last_of_three_ranks(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init()
step = wh.function(lambda x, y: descend(tf.nn.relu(x) if wh.rank() == 2 else tf.nn.elu(x), y))
step(x, y)
print("went on")
""",
        size=3,
    )
    assert "rank 2" in said
    assert "relu" in said.lower()
    assert "elu" in said.lower()


def test_a_step_on_one_rank_while_the_other_ends(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init()
step = wh.function(descend)
if wh.rank() == 0:
    step(x, y)
    print("went on")
""",
    )
    assert "rank 0 failed" in said
    assert re.search(r"rank 1.*(left|ended)", said), said


def test_a_step_on_one_rank_while_the_other_waits(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init(wh.Config({"debug.check_timeout_s": 3.0}))
step = wh.function(descend)
if wh.rank() == 0:
    step(x, y)
    print("went on")
else:
    time.sleep(600)
""",
    )
    assert "rank 0 failed" in said
    assert re.search(r"rank 1|ranks \[1\]", said), said


def test_a_later_step_on_one_rank_only(launcher: Launcher) -> None:
    """Both ranks have run the step before, so there is nothing left to compare: the step itself must find out."""
    _, said = fails(
        launcher,
        STEP
        + """
wh.init()
step = wh.function(descend)
step(x, y)
if wh.rank() == 0:
    float(step(x, y))
    print("went on")
""",
    )
    assert "rank 0 failed" in said
    assert re.search(r"rank 1.*(left|ended)", said), said


def test_different_steps_at_the_same_time(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init()
train, evaluate = wh.function(descend), wh.function(lambda x, y: tf.reduce_mean(tf.matmul(x, w) - y))
train(x, y), evaluate(x, y)
float(train(x, y) if wh.rank() == 0 else evaluate(x, y))
print("went on")
""",
    )
    for fact in ("CommError", "rank 0: `descend`", "rank 1: `<lambda>`", "run the same script"):
        assert fact in said, said


def test_different_fetches(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        """
import numpy as np, tensorflow as tf, whale as wh
wh.init()
graph = tf.Graph()
with graph.as_default():
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    w = tf.compat.v1.get_variable("w", [3, 1], initializer=tf.compat.v1.ones_initializer())
    mean, total = tf.reduce_mean(tf.matmul(x, w)), tf.reduce_sum(tf.matmul(x, w))
    start = tf.compat.v1.global_variables_initializer()
with wh.Session(graph=graph) as session:
    session.run(start)
    session.run(mean if wh.rank() == 0 else total, {x: np.ones((8, 3), np.float32)})
    print("went on")
""",
    )
    assert "ProgramError" in said
    assert "first difference" in said


def test_shares_for_another_number_of_ranks(launcher: Launcher) -> None:
    _, said = fails(
        launcher,
        STEP
        + """
wh.init(wh.Config({"batch.shares": [5, 5, 5]}))
wh.function(descend)(x, y)
print("went on")
""",
    )
    assert "PlanError" in said
    for fact in ("batch.shares", "[5, 5, 5] for 2 ranks", "[4, 4]", "next:"):
        assert fact in said, said


def test_unknown_configuration_key(launcher: Launcher) -> None:
    _, said = fails(launcher, 'import whale as wh\nwh.init(wh.Config({"replica.share": [4, 4]}))\nprint("went on")')
    assert "ConfigError" in said
    assert "'replica.share'" in said
    assert "batch.shares" in said


def test_scope_before_init(launcher: Launcher) -> None:
    _, said = fails(launcher, 'import whale as wh\nwith wh.replica():\n    print("went on")')
    assert "ClusterError" in said
    assert "wh.init()" in said


@pytest.mark.core
def test_script_that_raises_on_one_rank(launcher: Launcher) -> None:
    done, said = fails(
        launcher,
        STEP
        + """
wh.init()
step = wh.function(descend)
for index in range(100000):
    step(x, y)
    if wh.rank() == 1 and index == 3:
        raise ValueError("batch 3 is empty")
print("went on")
""",
    )
    assert done.returncode == 1
    assert "rank 1 failed: ValueError: batch 3 is empty (exit code 1)" in said
    assert said.count("Traceback") == 1, said


def test_layer_called_as_the_project_that_fails_on_one_rank(launcher: Launcher) -> None:
    done, said = fails(
        launcher,
        """
import numpy as np, tensorflow as tf, whale as wh
wh.init()
def total(x):
    with tf.name_scope("WhaleNet"):
        return tf.reduce_sum(tf.debugging.check_numerics(x, "WhaleNet was given no numbers"))
step = wh.function(total)
x = np.ones((8, 2), np.float32)
step(x)
x[6] = np.nan  # a row of rank 1
step(x)
print("went on")
""",
    )
    assert done.returncode == 1
    assert "whale run: rank 1 failed: InvalidArgumentError: " in said and "WhaleNet was given no numbers" in said
    assert "CommError" not in said, said


def test_a_rank_whose_operation_fails_is_the_cause_though_another_reports_first(launcher: Launcher) -> None:
    """Every rank raises the error of TensorFlow that one of them met."""
    _, said = fails(
        launcher,
        """
import time
import numpy as np, tensorflow as tf, whale as wh
wh.init()
step = wh.function(lambda x: tf.reduce_sum(tf.debugging.check_numerics(x, "no numbers")))
x = np.ones((8, 2), np.float32)
step(x)
x[6] = np.nan  # a row of rank 1
try:
    step(x)
except tf.errors.InvalidArgumentError:
    time.sleep(0.3 * wh.rank())
    raise
""",
    )
    assert "whale run: rank 1 failed: InvalidArgumentError: " in said and "rank 0 failed" not in said, said


def test_rank_that_is_killed(launcher: Launcher) -> None:
    done, said = fails(
        launcher,
        STEP
        + """
import os, signal
wh.init()
step = wh.function(descend)
for index in range(100000):
    step(x, y)
    if wh.rank() == 1 and index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
print("went on")
""",
    )
    assert done.returncode == 128 + 9
    assert "rank 1 was killed by SIGKILL" in said


def test_rank_that_is_killed_before_it_sends_first_values(launcher: Launcher) -> None:
    launcher.settings = PATIENT
    _, said = fails(
        launcher,
        STEP
        + """
import os, signal
import whale.runtime.variables.variable_store as owner
wh.init()
assert callable(owner.broadcast_values)
if wh.rank() == 0:
    owner.broadcast_values = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    wh.function(descend)(x, y)
except wh.CommError as error:
    print("told:", error)
    raise
print("went on")
""",
    )
    # Whether it waited already, or was about to, depends on who is faster.
    assert re.search(r"told: rank 0 was killed by SIGKILL.* rank 1 .*Broadcast 'whale/first_values/", said), said
