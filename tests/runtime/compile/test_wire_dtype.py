"""communication.wire_dtype: gradients travel with 16 bits; the result is that of one device to their precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current

Start = Callable[..., None]
STEPS, RATE = 3, 0.5


def trained(
    function: Any, scope: Callable[[], Any] = contextlib.nullcontext, momentum: bool = False
) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses after some steps of gradient descent."""
    generator = np.random.default_rng(1)
    shapes = ((30, 40), (40, 1))
    weights = [tf.Variable(generator.standard_normal(s).astype(np.float32) / 8) for s in shapes]
    slots = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]
    x, y = generator.standard_normal((12, 30)).astype(np.float32), np.ones((12, 1), np.float32)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with scope():
                h = tf.tanh(x @ weights[0])
            loss = tf.reduce_mean(tf.square(h @ weights[1] - y))
        for weight, slope, slot in zip(weights, tape.gradient(loss, weights), slots):
            if momentum:
                slope = slot.assign(0.5 * slot + slope)
            weight.assign_sub(RATE * slope)
        return loss

    losses = [float(step(tf.constant(x), tf.constant(y))) for _ in range(STEPS)]
    return [w.numpy() for w in weights], losses


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_the_result_is_that_of_one_device_to_the_precision_of_the_wire(ranks: Start, dtype: str, bits: int) -> None:
    one, losses_of_one = trained(tf.function)
    ranks(3, **{"communication.wire_dtype": dtype})
    weights, losses = trained(wh.function)
    assert losses[0] == pytest.approx(losses_of_one[0], rel=1e-6)  # the loss itself is not rounded
    np.testing.assert_allclose(losses, losses_of_one, rtol=4 * 2.0**-bits)
    for weight, other in zip(weights, one):
        error = np.max(np.abs(weight - other)) / np.max(np.abs(other))
        assert 2.0 ** -(bits + 8) < error < 2 * 2.0**-bits, "rounded, and no more than the wire rounds"
    (sent,) = {c.logical_bytes // c.calls for c in require_current("test").comms[0].counters() if "group" in c.key}
    assert sent == pytest.approx(2 * 2 * 2 * (30 * 40 + 40) / 3, abs=2)


def test_groups_of_ranks_round_what_they_send_each_other(ranks: Start) -> None:
    one, _ = trained(tf.function)
    ranks(4, mesh=wh.Mesh(data=2, tensor=2), **{"communication.wire_dtype": "bfloat16"})
    weights, _ = trained(wh.function, wh.split)
    for weight, other in zip(weights, one):
        error = np.max(np.abs(weight - other)) / np.max(np.abs(other))
        assert 2.0**-16 < error < 2 * 2.0**-8
    counters = [c for c in require_current("test").comms[0].counters() if "@0+2" in c.key]
    sent = [c.logical_bytes // c.calls for c in counters]
    half = 30 * 40 // 2 * 2  # elements of a rank's part of the first weight, of two bytes
    # Two ranks, of which each sends half of what moves; a part of the second weight's gradient is with it.
    assert half + 40 // 2 * 2 in sent, sent


@pytest.mark.parametrize("level", [1, 3])
def test_gradients_are_rounded_on_their_way_to_state_that_lies_split(ranks: Start, level: int) -> None:
    one, losses_of_one = trained(tf.function, momentum=True)
    rest = {"memory.zero": level, "memory.zero_min_bytes": 0, "pipeline.micro_batches": 2}
    ranks(2, **{"communication.wire_dtype": "bfloat16", **rest})
    weights, losses = trained(wh.function, momentum=True)
    np.testing.assert_allclose(losses, losses_of_one, rtol=4 * 2.0**-8)
    for weight, other in zip(weights, one):
        error = np.max(np.abs(weight - other)) / np.max(np.abs(other))
        assert 2.0**-16 < error < 2 * 2.0**-8, "rounded, and no more than the wire rounds"
    sent = {c.logical_bytes // c.calls for c in require_current("test").comms[0].counters() if ">S" in c.key}
    assert 30 * 40 // 2 * 2 in sent, sent  # half of the first weight, of two bytes
