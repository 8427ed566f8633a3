"""Batches of products of small matrices: our kernel, with the values of TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.kernels.one_rank import on_one_rank, without
from tests.programs import Builder
from whale.ir.program import COMPILED
from whale.ir.values import DType, TensorType
from whale.kernels.einsums import EINSUM, LEAST, MOST, MOST_OF_BATCHES, replace_einsums

pytestmark = pytest.mark.core
CLOSE = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def attention(q: tf.Tensor, k: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch((q, k))
        shares = tf.nn.softmax(tf.einsum("aecd,abcd->acbe", k, q))
        found = tf.einsum("acbe,aecd->abcd", shares, k)
        loss = tf.reduce_sum(tf.square(found))
    return [loss, *tape.gradient(loss, (q, k))]


def products(q: tf.Tensor, k: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch((q, k))
        shares = tf.nn.softmax(tf.matmul(q, k, transpose_b=True))
        loss = tf.reduce_sum(tf.square(shares @ k))
    return [loss, *tape.gradient(loss, (q, k))]


def heads(q: tf.Tensor, k: tf.Tensor) -> list[tf.Tensor]:
    """As programs have it that know no Einsum."""
    with tf.GradientTape() as tape:
        tape.watch((q, k))
        query, key = (tf.transpose(one, (0, 2, 1, 3)) for one in (q, k))
        shares = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
        loss = tf.reduce_sum(tf.square(tf.transpose(shares @ key, (0, 2, 1, 3))))
    return [loss, *tape.gradient(loss, (q, k))]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("body", [attention, products, heads])
def test_an_attention_and_its_gradients(body: Callable[..., Any], dtype: str) -> None:
    draw = np.random.default_rng(5)
    given = [tf.constant(draw.normal(size=(2, 7, 6, 5)), dtype) for _ in range(2)]
    expected = [value.numpy() for value in tf.function(body)(*given)]
    found, operations = on_one_rank(body, *given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=20 * CLOSE[dtype], atol=20 * CLOSE[dtype])
    assert operations[EINSUM] == 6 and not operations["Einsum"] and not operations["BatchMatMulV2"]
    assert operations["Transpose"] == (1 if body is heads else 0)  # of the sum of both gradients of the keys
    _, operations = on_one_rank(body, *given, **without("einsums"))
    assert operations[EINSUM] == 0 and operations["Einsum"] + operations["BatchMatMulV2"] == 6


@pytest.mark.parametrize(
    ("equation", "left", "right", "own"),
    [
        ("abd,acd->abc", (4, 6, 5), (4, 7, 5), "abd,acd->abc"),
        ("abd,acd->acb", (4, 6, 5), (4, 7, 5), "acd,abd->acb"),  # what comes last is of the right operand
        ("abd,acd->bca", (4, 6, 5), (4, 7, 5), ""),  # of both
        ("bd,cd->bc", (6, 5), (7, 5), ""),  # one product
        ("abd,acd->abc", (1, 6, 5), (1, 7, 5), ""),
        ("abd,acd->abc", (1, 6, 5), (4, 7, 5), ""),  # repeated
        ("...bd,...cd->...bc", (4, 6, 5), (4, 7, 5), ""),
        ("abde,acde->abc", (4, 6, 5, 2), (4, 7, 5, 2), ""),
        ("abd,ac->abc", (4, 6, 5), (4, 7), ""),  # a sum of one operand
        ("abd,acd->abc", (4, 6, MOST_OF_BATCHES + 1), (4, 7, MOST_OF_BATCHES + 1), ""),
        ("bad,cad->abc", (6, 4, MOST_OF_BATCHES + 1), (7, 4, MOST_OF_BATCHES + 1), "bad,cad->abc"),
        ("bad,cad->abc", (6, 4, MOST + 1), (7, 4, MOST + 1), ""),
        ("abd,acd->abc", (4, LEAST - 1, 5), (4, 7, 5), ""),
        ("abd,acd->abc", (4, 6, 5), (4, LEAST - 1, 5), ""),
    ],
)
def test_which_einsums(equation: str, left: tuple[int, ...], right: tuple[int, ...], own: str) -> None:
    b = Builder()
    x, y = b.input("x", left), b.input("y", right)
    made = TensorType("float64", np.einsum(equation, np.zeros(left), np.zeros(right)).shape)
    program = b.build([b.node("Einsum", (x, y), [made], "e", equation=equation, N=2, T=DType("float64"))])
    (node,) = (n for n in replace_einsums(program).nodes if n.name == "e")
    assert (node.attrs["equation"] if node.op == EINSUM else "") == own
    assert not own or sorted(r.node for r in node.inputs) == ["x", "y"]


@pytest.mark.parametrize("fetched", ["", "product", "moved"])
def test_what_is_transposed_for_a_product_and_of_one(fetched: str) -> None:
    b = Builder()
    x, y = b.input("x", (2, 6, 3, 5)), b.input("y", (2, 7, 3, 5))
    moved = b.transpose(x, 0, 2, 1, 3)
    product = b.op("BatchMatMulV2", moved, b.transpose(y, 0, 2, 3, 1), name="p", adj_x=False, adj_y=False)
    end = b.transpose(product, 0, 2, 1, 3)
    program = b.build([end, *{"product": [product], "moved": [moved]}.get(fetched, [])])
    made = replace_einsums(program)
    (node,) = (n for n in made.nodes if n.op == EINSUM)
    assert [r.node for r in node.inputs] == ["x", "y"]
    assert node.attrs["equation"] == ("ambk,anbk->abmn" if fetched == "product" else "ambk,anbk->ambn")
    assert node.name == ("p" if fetched == "product" else end.node)
    assert sum(n.op == "Transpose" for n in made.nodes) == (1 if fetched else 0)
    assert {ref.node for ref in made.outputs} <= made.by_name.keys()


def test_a_product_whose_transposition_another_one_reads() -> None:
    b = Builder()
    x, y = b.input("x", (2, 6, 5)), b.input("y", (2, 5, 6))
    product = b.op("BatchMatMulV2", x, y, name="p", adj_x=False, adj_y=False)
    again = b.op("BatchMatMulV2", b.transpose(product, 0, 2, 1), y, name="again", adj_x=False, adj_y=True)
    program = replace_einsums(b.build([again]))
    found = {n.name: n for n in program.nodes}
    assert found["p"].op == found["again"].op == EINSUM and "p" in {r.node for r in found["again"].inputs}
    assert not any(n.op == "Transpose" for n in program.nodes)


def test_which_batches() -> None:
    for rows, dtype, attrs, mine in (
        (6, "float64", {}, True),
        (6, "bfloat16", {}, False),
        (MOST_OF_BATCHES + 1, "float64", {}, False),
        (6, "float64", {COMPILED: True}, False),
    ):
        b = Builder()
        x, y = b.input("x", (4, rows, 5), dtype), b.input("y", (4, 7, 5), dtype)
        batch = b.op("BatchMatMulV2", x, y, name="e", adj_x=False, adj_y=True, T=DType(dtype), **attrs)
        (node,) = (n for n in replace_einsums(b.build([batch])).nodes if n.name == "e")
        assert (node.op == EINSUM) is mine, (rows, dtype, attrs)
        assert not mine or node.attrs["equation"] == "amk,ank->amn"
