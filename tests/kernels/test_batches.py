"""Batches of products with one matrix in common: one product, with the values of TensorFlow's kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.kernels.one_rank import without
from tests.programs import Builder
from whale.ir.program import Node, Program
from whale.ir.values import DType
from whale.kernels.matmuls import replace_batches

pytestmark = pytest.mark.core
BATCH = "BatchMatMulV2"


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def ops(program: Program) -> Counter[str]:
    return Counter(node.op for graph in (program, *program.functions.values()) for node in graph.nodes)


@pytest.mark.parametrize(
    ("left", "right", "transposed", "products"),
    [
        ((4, 6, 5), (5, 7), False, 3),
        ((4, 6, 5), (7, 5), True, 3),
        ((2, 3, 6, 5), (5, 7), False, 3),
        ((4, 6, 5), (1, 5, 7), False, 3),
        ((6, 5), (1, 1, 5, 7), False, 2),
        ((4, 6, 5), (4, 5, 7), False, 0),  # a matrix each
        ((2, 3, 6, 5), (3, 5, 7), False, 0),
        ((0, 6, 5), (5, 7), False, 0),  # nothing
    ],
)
def test_a_batch_and_its_gradients(
    left: tuple[int, ...], right: tuple[int, ...], transposed: bool, products: int
) -> None:
    draw = np.random.default_rng(1)
    given = tuple(tf.constant(draw.normal(size=shape)) for shape in (left, right))

    def multiplied(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            made = tf.raw_ops.BatchMatMulV2(x=x, y=w, adj_y=transposed)
            loss = tf.reduce_sum(tf.sin(made))
        return [made, *tape.gradient(loss, (x, w))]

    def run(function: Callable[..., Any]) -> tuple[list[np.ndarray], Any]:
        step = function(multiplied)
        return [value.numpy() for value in step(*given)], step

    expected, _ = run(tf.function)
    wh.init({"communication.in_process_ranks": 1})
    found, step = run(wh.function)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert ops(step._step(given, {}).compiled.ranks[0])["MatMul"] == products


def summed(*others: str) -> Program:
    """The sum of a batch of products over its matrices' rows, beside what ``others`` name."""
    b = Builder()
    x, y = b.input("x", (4, 6, 5)), b.input("y", (4, 6, 7))
    batch = b.op(BATCH, x, y, name="batch", adj_x=True, adj_y=False, T=DType("float64"))
    outputs = [b.op("Sum", batch, b.ints(*([1] if "rows" in others else [0])), name="sum", keep_dims=False)]
    if "read" in others:
        outputs.append(b.op("Neg", batch))
    if "fetched" in others:
        outputs.append(batch)
    if "waited for" in others:
        outputs.append(b.op("Neg", x, controls=["batch"]))
    return b.build(outputs)


def test_the_sum_of_a_batch_is_one_product_where_nobody_else_needs_the_batch() -> None:
    assert ops(replace_batches(summed()))["MatMul"] == 1
    for other in ("rows", "read", "fetched", "waited for"):
        assert ops(replace_batches(summed(other)))[BATCH] == 1, other


def test_a_product_waits_for_what_the_batch_and_its_sum_waited_for() -> None:
    program = summed()
    late = {"batch": ("x",), "sum": ("y",)}
    nodes = tuple(Node(n.name, n.op, n.inputs, late.get(n.name, ()), n.attrs, n.outputs) for n in program.nodes)
    (product,) = [n for n in replace_batches(program.replace_nodes(nodes)).nodes if n.op == "MatMul"]
    assert (product.name, set(product.controls)) == ("sum", {"x", "y"})


def test_the_key_turns_it_off() -> None:
    for on in (True, False):
        wh.init({"communication.in_process_ranks": 1, **({} if on else without("products"))})
        given = tf.ones((2, 3, 4)), tf.ones((4, 5))
        step = wh.function(tf.matmul)
        np.testing.assert_array_equal(step(*given), tf.fill((2, 3, 5), 4.0))
        assert ops(step._step(given, {}).compiled.ranks[0])["MatMul"] == on
        wh.shutdown()
