"""Ranks look for a way to spread a program together, and none waits for one that fails at it."""

from __future__ import annotations

import pytest

from tests.launcher.helpers import Launcher

STEP = """
import os, signal, sys
import numpy as np, tensorflow as tf, whale as wh
from whale.planner.graph_search import strategies, team

strategies.LEAST_BYTES = 1
wh.init({"mesh.auto_parallel": True})
predicted = team.predict

def tried(plans, choice, *bounds):
    print("rank", wh.rank(), "looks at", choice.name, flush=True)
    if wh.rank() == 1:
        FAULT
    return predicted(plans, choice, *bounds)

team.predict = tried
x, y = np.random.default_rng(0).random((8, 6)), np.arange(8, dtype=np.int32)

def model(function):
    tf.keras.utils.set_random_seed(1)
    tf.keras.backend.set_floatx("float64")
    layer = tf.keras.layers.Dense(64)
    layer.build((None, 6))
    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=layer(x)))
        for v, g in zip(layer.trainable_variables, tape.gradient(loss, layer.trainable_variables)):
            v.assign_sub(0.1 * g)
        return loss
    return [float(train(x, y)) for _ in range(3)]

np.testing.assert_allclose(model(wh.function), model(tf.function), rtol=1e-12)
print("rank", wh.rank(), "is like one device")
"""


@pytest.mark.core
def test_the_second_rank_looks_at_ways_as_well(launcher: Launcher) -> None:
    launcher.environment["WHALE_MESH_PLAN_CACHE"] = str(launcher.folder / "plans")
    done = launcher.run("-np", "2", launcher.script(STEP.replace("FAULT", "pass")), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is like one device" in done.stdout for rank in range(2)), done.stdout
    assert "rank 0 looks at data parallel" in done.stdout
    assert "rank 1 looks at split from" in done.stdout


@pytest.mark.parametrize(
    "fault, told",
    [
        ("raise RuntimeError('no such tensor')", "rank 1 could not predict a plan: RuntimeError: no such tensor"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ", marks=pytest.mark.long),
    ],
)
def test_nobody_waits_for_a_rank_that_fails_at_it(launcher: Launcher, fault: str, told: str) -> None:
    launcher.environment["WHALE_MESH_PLAN_CACHE"] = str(launcher.folder / "plans")
    done = launcher.run("-np", "2", launcher.script(STEP.replace("FAULT", fault)), timeout_s=600)
    assert done.returncode == (137 if "KILL" in fault else 1), done.stderr
    assert told in done.stderr.splitlines()[-1], done.stderr
    assert launcher.left_behind() == []
