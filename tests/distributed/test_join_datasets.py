"""Ranks that join a loop with wh.State read the others' rows, wherever the script makes its datasets, or are told."""

from __future__ import annotations

import subprocess

import pytest

from tests.launcher.helpers import Launcher

SCRIPT = """
import os
import time

import numpy as np
import tensorflow as tf

import whale as wh
from whale.runtime.context import find_running

PATH, WHERE, GROWS_AT, SAMPLES = os.environ["HOSTS_FILE"], "{where}", {grows_at}, 48
wh.init({{"fault.elastic": "memory", "fault.join": "always"}})
numbers = np.arange(SAMPLES, dtype=np.float64)
factor = tf.Variable(1.0, dtype=tf.float64)


def make():
    return wh.shard(tf.data.Dataset.from_tensor_slices(numbers).shuffle(SAMPLES).batch(8))


def grow():
    watch = find_running().watch
    known = len(watch.list_changes(0, 0.0))
    with open(PATH, "w") as file:
        file.write("localhost:3")
    until_s = time.monotonic() + 100.0
    while len(watch.list_changes(known, 1.0)) <= known:
        assert time.monotonic() < until_s, "nobody has come"


@wh.function
def step(x):
    with wh.replica():
        factor.assign_sub(1e-6 * tf.reduce_mean(x) * factor)
        return tf.reduce_sum(x), tf.reduce_sum(x * x)


state = wh.State(epoch=0, sums=[])
batches = None
if WHERE == "behind a call of all":
    step(tf.zeros(8, tf.float64))
if WHERE in ("after the state", "behind a call of all"):
    batches = make()
for epoch in range(state.epoch, 4):
    state.epoch = epoch
    if WHERE == "in the loop":
        batches = make()
    elif WHERE == "shuffled once":
        batches = wh.shard(tf.data.Dataset.from_tensor_slices(numbers).batch(8)) if batches else make()
    for x in state.rest(batches):
        if wh.rank() == 0 and wh.size() == 2 and len(state.sums) == GROWS_AT:
            grow()
        state.sums.append([float(one) for one in step(x)])
    tf.random.uniform(())  # a line behind the steps that asks for seeds
if wh.rank() == 0:
    print(wh.size(), np.reshape(state.sums, (4, -1, 2)).sum(1).tolist())
wh.shutdown()
"""


def run(launcher: Launcher, where: str) -> subprocess.CompletedProcess[str]:
    """Runs two ranks, which a third one joins in the third of four epochs."""
    hosts = launcher.folder / "hosts.txt"
    hosts.write_text("localhost:2")
    launcher.environment["HOSTS_FILE"] = str(hosts)
    return launcher.run("--hosts-from", str(hosts), launcher.script(SCRIPT.format(where=where, grows_at=14)))


@pytest.mark.parametrize("where", ["after the state", "in the loop"])
def test_each_sample_is_read_once_an_epoch(launcher: Launcher, where: str) -> None:
    done = run(launcher, where)
    assert f"3 {[[1128.0, 35720.0]] * 4}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("shuffled once", "a process that joins reads another dataset than the other ranks"),
        ("behind a call of all", "makes a call that the other ranks have made together before"),
    ],
)
def test_what_a_rank_that_joins_would_do_otherwise_is_told(launcher: Launcher, where: str, error: str) -> None:
    done = run(launcher, where)
    assert done.returncode == 1
    assert error in done.stderr
