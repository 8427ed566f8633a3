"""Batches of products of small matrices: our kernel's, wherever they lie, are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import whale_ops

pytestmark = pytest.mark.core
CLOSE = {"float32": 1e-5, "float64": 1e-13}


def kernel(equation: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return whale_ops.load_ops().whale_einsum(left=left, right=right, equation=equation).numpy()


def drawn(equation: str, dtype: str, **sizes: int) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    terms = equation.partition("->")[0].split(",")
    return [draw.normal(size=[sizes[letter] for letter in term]).astype(dtype) for term in terms]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    "equation",
    [
        "bqhd,bkhd->bhqk",  # scores of an attention
        "bhqk,bkhd->bqhd",
        "bhqk,bqhd->bkhd",  # a gradient: the left matrix transposed
        "bqd,bkd->bqk",
        "bdq,bdk->bqk",
        "qdb,kdb->bqk",  # others lie between
    ],
)
@pytest.mark.parametrize("long", [1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 47, 64, 70])
def test_products_of_any_sizes_and_places(equation: str, long: int, dtype: str) -> None:
    for short in (1, 4, 9):
        sizes = {"b": 3, "h": 2, "q": long, "k": short, "d": 13}
        for turned in (sizes, {**sizes, "q": short, "k": long}, {**sizes, "d": long}):
            left, right = drawn(equation, dtype, **turned)
            expected = np.einsum(equation, left, right)
            np.testing.assert_allclose(
                kernel(equation, left, right), expected, rtol=CLOSE[dtype], atol=10 * CLOSE[dtype]
            )


def test_few_products_are_divided_by_rows_and_nothing_is_nothing() -> None:
    left, right = drawn("bqd,bkd->bqk", "float32", b=1, q=401, k=33, d=20)
    expected = np.einsum("bqd,bkd->bqk", left, right)
    np.testing.assert_allclose(kernel("bqd,bkd->bqk", left, right), expected, rtol=1e-5, atol=1e-4)
    assert kernel("bqd,bkd->bqk", left[:, :0], right).shape == (1, 0, 33)
    assert not kernel("bqd,bkd->bqk", left[..., :0], right[..., :0]).any()


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("bqd->bq", "not have two operands"),
        ("bqd,bkd", "not have two operands"),
        ("bqq,bkq->bqk", "twice in a term"),
        ("bqd,bkd->bkq", "not end with the right operand's letter"),
        ("bqde,bkde->bqk", "the left operand has a letter of its own"),
        ("bqd,bkde->bqk", "the right operand has a letter of its own"),
        ("bqd,bkd->bqkx", "a letter of the result"),
        ("bqd,bd->bq", "is missing"),
    ],
)
def test_other_equations_are_refused(equation: str, why: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"equation '{equation}': .*{why}.*expected one like"):
        whale_ops.load_ops().whale_einsum(left=np.ones((2, 2, 2)), right=np.ones((2, 2, 2)), equation=equation)


def test_operands_that_do_not_fit_are_refused() -> None:
    said = r"\[2,3,4\] and \[2,3,5\]; expected sizes as in bqd,bkd->bqk"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        kernel("bqd,bkd->bqk", np.ones((2, 3, 4)), np.ones((2, 3, 5)))
