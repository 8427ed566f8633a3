"""The operation of a loss against numbers of classes gives what TensorFlow's does, for numbers of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_ops

pytestmark = pytest.mark.core


def both(logits: Any, labels: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The loss and the gradient: Whale's, and TensorFlow's of the same numbers in float64."""
    found = whale_ops.load_ops().whale_sparse_cross_entropy(logits, labels)
    expected = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=tf.cast(logits, "float64"), labels=labels)
    return [(one.numpy(), other.numpy()) for one, other in zip(found, expected)]


@pytest.mark.parametrize("classes", [1, 2, 10, 31, 32, 33, 64, 1000, 8191])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_losses_and_gradients(classes: int, kind: str) -> None:
    draw = np.random.default_rng(classes)
    rows = 37
    logits = tf.constant(draw.normal(size=(rows, classes)) * 10.0 ** draw.integers(-2, 3, (rows, 1)), "float32")
    labels = tf.constant(draw.integers(0, classes, rows), kind)
    for one, other in both(logits, labels):
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6)


def test_shares_are_exact_in_the_last_places_down_to_the_smallest_normal_numbers() -> None:
    """A share is exp(logit - largest) over a sum that is 1 to the last place."""
    gaps = np.linspace(20.0, 87.0, 4000, dtype="float32")
    logits = np.zeros((1, 4001), "float32")
    logits[0, 1:] = -gaps
    (_, _), (found, expected) = both(tf.constant(logits), tf.constant([0]))
    np.testing.assert_allclose(found[0, 1:], expected[0, 1:], rtol=4e-7)


def test_what_is_infinite_or_no_number() -> None:
    inf, nan = np.inf, np.nan
    logits = tf.constant(
        [[1, -inf, 2, -200], [nan, 1, 2, 3], [inf, 1, 2, 3], [-inf, -inf, -inf, -inf], [3e38, -3e38, 0, 1]], "float32"
    )
    for one, other in both(logits, tf.constant([0, 1, 2, 3, 0])):
        np.testing.assert_allclose(one, other.astype("float32"), rtol=1e-6)
    (_, _), (gradient, _) = both(logits, tf.constant([0, 1, 2, 3, 0]))
    assert gradient[0, 1] == gradient[0, 3] == 0  # masked: no share at all


def test_any_bits_of_no_number_are_none() -> None:
    logits = np.zeros((1, 64), "float32")
    for bits in (0x7FC00001, 0xFFC000FF, 0x7FC0007F):
        logits.view("uint32")[0, 5] = bits
        (loss, _), (gradient, _) = both(tf.constant(logits), tf.constant([0]))
        assert np.isnan(loss).all() and np.isnan(gradient).all(), hex(bits)


def test_no_rows_are_no_losses() -> None:
    for one, other in both(tf.zeros((0, 5)), tf.zeros((0,), "int64")):
        assert one.shape == other.shape


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        ((4, 5), [0, 1, 2, 5], "label value of 5 which is outside the valid range of \\[0, 5\\)"),
        ((4, 5), [0, -1, 2, 3], "label value of -1 "),
        ((4, 5), [0, 1, 2], "expected \\[rows, classes\\] and \\[rows\\]"),
    ],
)
def test_wrong_labels_are_refused(logits: tuple[int, ...], labels: list[int], says: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        whale_ops.load_ops().whale_sparse_cross_entropy(tf.zeros(logits), labels)
