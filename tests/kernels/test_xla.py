"""Ops without CPU kernels that came from functions compiled by XLA: compiled again, with local shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.capture.function import capture_function
from whale.ir.program import COMPILED
from whale.kernels.xla import compile_marked
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings


@pytest.fixture(params=[(5, 3, 0), (0, 8)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    shares = list(request.param)
    wh.init(wh.Config({"communication.in_process_ranks": len(shares), "batch.shares": shares}))
    yield
    wh.shutdown()


class Net(tf.Module):
    """A grouped convolution in a loop and pooling with the channels first: both need XLA on the CPU."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.kernel = tf.Variable(generator.normal(size=(3, 3, 2, 4)) / 4)
        self.top = tf.Variable(generator.normal(size=(4, 3)))

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = tf.tanh(tf.nn.conv2d(x, self.kernel, 1, "SAME"))
        pooled = tf.nn.max_pool2d(tf.transpose(x, [0, 3, 1, 2]), 2, 2, "VALID", data_format="NCHW")
        logits = tf.reduce_mean(pooled, [2, 3]) @ self.top
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    def gradients(self, x: tf.Tensor, y: tf.Tensor, loss: Callable[..., Any]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            value = loss(x, y)
        return value, tape.gradient(value, [self.kernel, self.top])


@pytest.mark.core
@pytest.mark.parametrize("whole", one_of(2, [True, False]), ids=["step", "part"])
def test_compiled_functions_equal_one_device(ranks: None, whole: bool) -> None:
    net = Net()
    loss = net.loss if whole else tf.function(net.loss, jit_compile=True)

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        return net.gradients(x, y, loss)

    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(8, 4, 4, 4)), generator.integers(0, 3, 8)
    one_device = tf.function(step, jit_compile=True)
    spread = wh.function(one_device if whole else step)
    for found, expected in zip(tf.nest.flatten(spread(x, y)), tf.nest.flatten(one_device(x, y)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert spread.plan(x, y).split_flops_fraction > 0.9


def test_gpus_have_kernels_for_all_but_xlas_own_operations() -> None:
    """Else each convolution of a `fit` would be compiled alone: Keras asks for XLA wherever there is a GPU."""
    net = Net()
    x = tf.ones((8, 4, 4, 4), tf.float64)
    one_device = tf.function(net.loss, jit_compile=True)
    captured = capture_function(lambda: one_device(x, tf.zeros(8, tf.int64)))
    normal = normalise(captured.program, PlanSettings(size=1))

    def calls(on_gpu: bool) -> list[str]:
        made = compile_marked(normal, on_gpu)
        nodes = (node for one in (made, *made.functions.values()) for node in one.nodes)
        return [node.op for node in nodes if node.attrs.get(COMPILED)]

    assert "PartitionedCall" in calls(False) and not calls(True)


@pytest.mark.core
@pytest.mark.parametrize("dtype", one_of(2, ["float32", "bfloat16"]))
def test_convolutions_that_have_a_kernel_are_not_compiled(dtype: str) -> None:
    """XLA's on processors take several times as long as oneDNN's."""
    kernels = {"plain": tf.Variable(tf.ones((3, 3, 4, 4), dtype)), "grouped": tf.Variable(tf.ones((3, 3, 2, 4), dtype))}

    @tf.function(jit_compile=True)
    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            for kernel in kernels.values():
                x = tf.tanh(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tape.gradient(x, list(kernels.values()))

    captured = capture_function(lambda: gradients(tf.ones((8, 4, 4, 4), dtype)))
    normal = normalise(captured.program, PlanSettings(size=1))
    found = [(node.op, bool(node.attrs.get(COMPILED))) for node in normal.nodes if node.op.startswith("Conv2D")]
    assert sorted(found) == [
        ("Conv2D", False),
        ("Conv2D", True),
        ("Conv2DBackpropFilter", False),
        ("Conv2DBackpropFilter", True),
        ("Conv2DBackpropInput", True),
    ]
    wh.init(wh.Config({"communication.in_process_ranks": 2}))
    for one, other in zip(
        wh.function(gradients)(tf.ones((8, 4, 4, 4), dtype)), gradients(tf.ones((8, 4, 4, 4), dtype))
    ):
        np.testing.assert_allclose(tf.cast(one, "float32"), tf.cast(other, "float32"), rtol=2e-2)
    wh.shutdown()
