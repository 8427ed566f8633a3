"""Convolutions as products of matrices: which of them become such, and that they give what TensorFlow's kernels do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.kernels.one_rank import without
from whale.ir.program import Program

pytestmark = pytest.mark.core
Sizes = tuple[int, ...]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def gradients(
    function: Callable[..., Any], image: Sizes, kernel: Sizes, dtype: str = "float64", **options: Any
) -> tuple[list[np.ndarray], Program | None]:
    """A convolution, and its gradients by the image and by the filter; what was run, of `wh.function`."""
    draw = np.random.default_rng(1)
    x, w = (tf.constant(draw.normal(size=shape), dtype) for shape in (image, kernel))
    options = {"strides": 1, "padding": "SAME", **options}

    def convolved(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            made = tf.nn.conv2d(x, w, **options)
            loss = tf.reduce_sum(tf.sin(made))
        return [made, *tape.gradient(loss, (x, w))]

    step = function(convolved)
    found = [value.numpy() for value in step(x, w)]
    return found, step._step((x, w), {}).compiled.ranks[0] if function is wh.function else None


def ops(program: Program | None) -> Counter[str]:
    assert program is not None
    return Counter(node.op for graph in (program, *program.functions.values()) for node in graph.nodes)


@pytest.mark.parametrize(
    ("image", "kernel", "options", "products", "patches"),
    [
        ((4, 6, 6, 5), (1, 1, 5, 7), {}, 3, 0),
        ((4, 6, 6, 5), (1, 1, 5, 7), {"padding": "VALID"}, 3, 0),
        ((2, 1, 1, 24), (1, 1, 24, 48), {"strides": 2}, 3, 0),  # of one point: strides do nothing
        ((1, 1, 1, 1), (1, 1, 1, 1), {}, 3, 0),
        ((4, 6, 6, 5), (1, 1, 5, 7), {"strides": 2}, 0, 0),
        ((4, 6, 6, 5), (1, 1, 5, 7), {"padding": [[0, 0], [1, 0], [0, 1], [0, 0]]}, 0, 0),
        ((2, 4, 4, 5), (1, 1, 5, 7), {"strides": 2, "padding": [[0, 0], [2, 1], [2, 1], [0, 0]]}, 0, 0),
        ((2, 2, 6, 5), (1, 1, 5, 7), {"strides": (2, 2), "padding": [[0, 0], [3, 3], [1, 0], [0, 0]]}, 0, 0),
        ((1, 8, 8, 1024), (1, 1, 1024, 1024), {}, 3, 0),  # few points, many weights
        ((1, 9, 9, 1024), (1, 1, 1024, 1024), {}, 0, 0),  # more than 64 points
        ((2, 4, 4, 96), (3, 3, 96, 160), {}, 1, 1),
        ((2, 8, 8, 96), (3, 3, 96, 160), {"strides": 2}, 1, 1),
        ((2, 9, 7, 96), (3, 5, 96, 160), {"strides": (2, 1), "padding": "VALID"}, 1, 1),
        ((2, 8, 8, 256), (1, 1, 256, 512), {"strides": 2}, 1, 1),
        ((2, 4, 4, 96), (3, 3, 96, 160), {"padding": [[0, 0], [1, 0], [0, 1], [0, 0]]}, 0, 0),
        ((2, 4, 4, 16), (3, 3, 16, 16), {}, 0, 0),  # few weights
        ((4, 6, 6, 96), (3, 3, 96, 160), {}, 0, 0),  # 144 points
    ],
)
def test_a_convolution_and_its_gradients(
    image: Sizes, kernel: Sizes, options: dict[str, Any], products: int, patches: int
) -> None:
    expected, _ = gradients(tf.function, image, kernel, **options)
    wh.init({"communication.in_process_ranks": 1})
    found, program = gradients(wh.function, image, kernel, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
    counts = ops(program)
    assert (counts["MatMul"], counts["ExtractImagePatches"]) == (products, patches)
    left = sum(counts[op] for op in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"))
    assert left == 3 - products


def test_the_key_turns_it_off_and_half_precision_is_left_alone() -> None:
    for config, dtype, products in (
        ({}, "float32", 3),
        ({}, "bfloat16", 0),
        (without("convolutions"), "float32", 0),
    ):
        wh.init({"communication.in_process_ranks": 1, **config})
        _, program = gradients(wh.function, (2, 4, 4, 8), (1, 1, 8, 8), dtype)
        assert ops(program)["MatMul"] == products, (config, dtype)
        wh.shutdown()


def test_groups_of_channels_are_no_product() -> None:
    wh.init({"communication.in_process_ranks": 1})
    step = wh.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"))
    x, w = tf.ones((2, 4, 4, 8)), tf.ones((1, 1, 4, 6))
    np.testing.assert_array_equal(step(x, w), tf.fill((2, 4, 4, 6), 4.0))
    assert ops(step._step((x, w), {}).compiled.ranks[0])["Conv2D"] == 1


def test_what_xla_compiles_is_left_alone() -> None:
    wh.init({"communication.in_process_ranks": 1})
    compiled = tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), jit_compile=True)
    x, w, grouped = tf.ones((2, 4, 4, 8)), tf.ones((1, 1, 8, 8)), tf.ones((1, 1, 4, 8))
    step = wh.function(lambda x, w, grouped: compiled(x, grouped) + tf.nn.conv2d(x, w, 1, "SAME"))
    np.testing.assert_array_equal(step(x, w, grouped), tf.fill((2, 4, 4, 8), 12.0))
    counts = ops(step._step((x, w, grouped), {}).compiled.ranks[0])
    assert (counts["MatMul"], counts["Conv2D"]) == (1, 1)
