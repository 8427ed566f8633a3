"""What TensorFlow's allocator has given out: live bytes and their peak."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf

from whale_ops.memory import memory, reset_peak

pytestmark = pytest.mark.core
MIB = 1 << 20


def test_live_bytes_follow_tensors_and_the_peak_stays():
    gc.collect()
    before = memory().live_bytes
    kept = tf.zeros((MIB,), tf.float32)
    assert memory().live_bytes == before + 4 * MIB
    passing = tf.zeros((2 * MIB,), tf.float32)
    del passing
    gc.collect()
    assert memory().live_bytes == before + 4 * MIB
    assert memory().peak_bytes >= before + 12 * MIB
    reset_peak()
    assert memory().peak_bytes == memory().live_bytes == before + 4 * MIB
    del kept


def test_a_step_that_needs_more_inside_has_a_peak_above_its_ends():
    x = tf.ones((512, 512))  # 1 MiB

    @tf.function
    def step(x):
        return tf.reduce_sum(tf.matmul(tf.exp(tf.matmul(x, x)), x))

    step(x)
    gc.collect()
    reset_peak()
    before = memory().live_bytes
    step(x)
    assert memory().peak_bytes >= before + 2 * MIB
    assert memory().live_bytes == before
