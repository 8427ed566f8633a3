"""Kernels of Whale's in place of TensorFlow's: where they stand, and that they give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.kernels.one_rank import on_one_rank, without
from whale.kernels.nn import CROSS_ENTROPY, DEPTHWISE

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def run(function: Callable[..., Any], body: Callable[..., Any], *given: tf.Tensor) -> list[np.ndarray]:
    return [value.numpy() for value in function(body)(*given)]


def loss_and_gradient(logits: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return [loss, tape.gradient(loss, logits)]


def test_losses_of_float32_are_computed_by_a_kernel_of_whale() -> None:
    draw = np.random.default_rng(0)
    labels = tf.constant(draw.integers(0, 50, 12))
    for dtype, config, count in (("float32", {}, 1), ("float64", {}, 0), ("float32", without("nn"), 0)):
        given = tf.constant(draw.normal(size=(12, 50)), dtype), labels
        found, operations = on_one_rank(loss_and_gradient, *given, **config)
        for one, other in zip(found, run(tf.function, loss_and_gradient, *given), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
        assert operations[CROSS_ENTROPY] == count, (dtype, config)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"strides": [1, 2, 2, 1], "padding": "VALID"}, 1),
        ({"padding": [[0, 0], [1, 0], [2, 1], [0, 0]]}, 1),
        ({"dilations": [2, 2]}, 1),  # TensorFlow puts the image's points in other images, and back
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_depthwise_filters(options: dict[str, Any], count: int, dtype: str) -> None:
    draw = np.random.default_rng(0)
    given = tuple(tf.constant(draw.normal(size=size), dtype) for size in ((3, 6, 7, 5), (3, 3, 5, 2)))
    options = {"strides": [1, 1, 1, 1], "padding": "SAME", **options}

    def body(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            loss = tf.reduce_sum(tf.sin(tf.nn.depthwise_conv2d(x, w, **options)))
        return list(tape.gradient(loss, (x, w)))

    allowed = {"float32": 1e-4, "float64": 1e-12}[dtype]
    found, operations = on_one_rank(body, *given)
    for one, other in zip(found, run(tf.function, body, *given), strict=True):
        np.testing.assert_allclose(one, other, rtol=allowed, atol=allowed)
    assert operations[DEPTHWISE] == count
    assert on_one_rank(body, *given, **without("nn"))[1][DEPTHWISE] == 0
