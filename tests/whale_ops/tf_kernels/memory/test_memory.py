"""What TensorFlow's allocator has given out: live bytes and their peak."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import warm_python

pytestmark = pytest.mark.core
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[3]


_LIVE = """
import gc
import tensorflow as tf
from whale_ops.memory import read_memory, reset_peak

MIB = 1 << 20
gc.collect()
before = read_memory().live_bytes
kept = tf.zeros((MIB,), tf.float32)
assert read_memory().live_bytes == before + 4 * MIB, (read_memory(), before)
passing = tf.zeros((2 * MIB,), tf.float32)
del passing
gc.collect()
assert read_memory().live_bytes == before + 4 * MIB, (read_memory(), before)
assert read_memory().peak_bytes >= before + 12 * MIB, (read_memory(), before)
reset_peak()
assert read_memory().peak_bytes == read_memory().live_bytes == before + 4 * MIB, (read_memory(), before)
"""

_PEAK = """
import gc
import tensorflow as tf
from whale_ops.memory import read_memory, reset_peak

MIB = 1 << 20
x = tf.ones((512, 512))  # 1 MiB

@tf.function
def step(x):
    return tf.reduce_sum(tf.matmul(tf.exp(tf.matmul(x, x)), x))

step(x)
gc.collect()
reset_peak()
before = read_memory().live_bytes
step(x)
assert read_memory().peak_bytes >= before + 2 * MIB, (read_memory(), before)
assert read_memory().live_bytes == before, (read_memory(), before)
"""

_EXCHANGES = """
import gc, statistics
import tensorflow as tf
import whale_ops
from tests.whale_ops.harness import ranks
from whale_ops.memory import read_memory, reset_peak

ops = whale_ops.load_ops()
with ranks(2) as communicators:

    @tf.function
    def step(x):
        results = []
        for communicator in communicators:
            handle = ops.whale_communicator(communicator=communicator.name, rank=communicator.rank)
            y = tf.negative(x)
            for number in range(12):
                y = ops.whale_all_gather(handle, [y[:, :256]], key=f"x{number}", axis=1, sizes=[256, 256])[0]
                y = tf.exp(y)
            results.append(tf.reduce_max(y))
        return results

    x = tf.zeros((512, 512))
    step(x)
    gc.collect()
    before = read_memory().live_bytes
    peaks = []
    for _ in range(60):
        reset_peak()
        step(x)
        peaks.append(read_memory().peak_bytes - before)
print("median", statistics.median(peaks))
"""


def _run_alone(script: str) -> str:
    """Runs a script in a process of its own, and returns what it prints.

    What a process did before decides which pieces its allocator has, and threads of other tests may still use it.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([warm_python(), "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_live_bytes_follow_tensors_and_the_peak_stays():
    _run_alone(_LIVE)


def test_a_step_that_needs_more_inside_has_a_peak_above_its_ends():
    _run_alone(_PEAK)


def test_what_an_exchange_has_used_is_given_back_before_others_go_on():
    """Threads that lose their core behind it would keep it meanwhile: nothing that follows could take its place."""
    median = float(_run_alone(_EXCHANGES).rpartition("median ")[2])
    # Of each rank: what is gathered, in parts and whole, and half of it.
    assert 0 < median <= 1.1 * 2 * 2.5 * MIB
