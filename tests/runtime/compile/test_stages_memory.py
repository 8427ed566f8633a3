"""Bytes that a pipeline holds: as many micro-batches as its schedule says, and no more than a slow reader has taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import tensorflow as tf

import whale as wh
from tests.memory import peaks_above
from whale.ir.pipeline_schedule import count_live_micro_batches, make_schedule

Start = Callable[..., None]
ROWS, WIDE, NARROW = 128, 1024, 16  # of a micro-batch; what is narrow is too small to be counted
TENSOR_BYTES = 4 * ROWS * WIDE
HELD = 4  # wide tensors that a backward pass reads


def peak_bytes(step: Callable[[tf.Tensor], tf.Tensor], micro_batches: int) -> int:
    """The least of some steps' peaks, above what was there before."""
    x = tf.random.stateless_normal((micro_batches * ROWS, NARROW), (1, 2))
    return peaks_above(lambda: partial(step, x), 3)[0]


def trained_peak_bytes(wide: int, stages: int, micro_batches: int) -> int:
    """Of a pipeline in which one stage has all the activations that count."""
    into, out = (tf.Variable(0.1 * tf.ones(shape)) for shape in ((NARROW, WIDE), (WIDE, NARROW)))
    small = [tf.Variable(tf.eye(NARROW)) for _ in range(stages)]

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for i in range(stages):
                with wh.stage():
                    x = tf.tanh(x @ small[i])
                    if i == wide:
                        x = x @ into
                        for _ in range(HELD):
                            x = tf.tanh(x)
                        x = x @ out
                    if i == stages - 1:
                        loss = tf.nn.l2_loss(x)
        for variable, slope in zip([into, out, *small], tape.gradient(loss, [into, out, *small])):
            variable.assign_sub(1e-3 * slope)
        return loss

    return peak_bytes(step, micro_batches)


def test_a_stage_holds_the_bytes_of_its_live_micro_batches(ranks: Start) -> None:
    """1F1B holds as many as there are stages from this one on, GPipe all."""
    stages = 3

    def found_bytes(name: str, wide: int, micro_batches: int) -> int:
        ranks(stages, **{"pipeline.micro_batches": micro_batches, "pipeline.schedule": name})
        found = trained_peak_bytes(wide, stages, micro_batches)
        wh.shutdown()
        return found

    one = found_bytes("1f1b", 0, 1)
    for name, wide, alive in (("1f1b", 0, 3), ("1f1b", 2, 1), ("gpipe", 1, 6)):
        assert alive == count_live_micro_batches(make_schedule(name, stages, 1, 6)[wide])
        found = (found_bytes(name, wide, 6) - one) / (HELD * TENSOR_BYTES)
        assert found == pytest.approx(alive - 1, abs=0.25), (name, wide)


def sent_on_peak_bytes(micro_batches: int) -> int:
    """Of a stage that sends what it makes to one that works a hundred times as much on it."""
    first, second = tf.Variable(tf.ones((NARROW, WIDE))), tf.Variable(0.1 * tf.eye(WIDE))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.stage():
            h = x @ first
        with wh.stage():
            for _ in range(3):
                h = h @ second
            return tf.nn.l2_loss(h)

    return peak_bytes(step, micro_batches)


def test_a_slow_consumer_leaves_its_producers_memory_flat(ranks: Start) -> None:
    found = []
    for micro_batches in (6, 24):
        ranks(2, **{"pipeline.micro_batches": micro_batches})
        found.append(sent_on_peak_bytes(micro_batches))
        wh.shutdown()
    few, many = found
    assert 2 * TENSOR_BYTES <= many <= few + 2 * TENSOR_BYTES, found
