"""The losses of ``wh.losses`` against their definitions, on one device (over ranks: tests/runtime/layouts)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ProgramError

ROWS, WIDTH, CLASSES = 6, 5, 24
RANDOM = np.random.default_rng(0)
FEATURES, WEIGHTS = RANDOM.normal(size=(ROWS, WIDTH)), RANDOM.normal(size=(WIDTH, CLASSES))
LABELS = np.array([3, 0, 23, 7, 7, 11])
HIT = np.eye(CLASSES)[LABELS]


def near() -> np.ndarray:
    return (FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True)) @ (WEIGHTS / np.linalg.norm(WEIGHTS, axis=0))


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(1)) - (logits * targets).sum(1)


def test_arcface_adds_to_the_angle() -> None:
    logits = 8.0 * np.where(HIT, np.cos(np.arccos(near()) + 0.3), near())
    found = wh.losses.arcface(FEATURES, WEIGHTS, LABELS, margin=0.3, scale=8.0)
    np.testing.assert_allclose(found, cross_entropy(logits, HIT), rtol=1e-6)
    smooth = wh.losses.arcface(FEATURES, WEIGHTS, LABELS, margin=0.3, scale=8.0, label_smoothing=0.1)
    np.testing.assert_allclose(smooth, cross_entropy(logits, 0.9 * HIT + 0.1 / CLASSES), rtol=1e-6)


def test_arcface_falls_where_the_cosine_would_rise_again() -> None:
    """A row that is opposite to its class: the nearer it gets, the smaller the loss."""
    rows = np.array([[-1.0, 0.05, 0.0], [-1.0, 0.2, 0.0], [-1.0, 0.5, 0.0]])
    own = np.cos(np.arccos(rows[:, 0] / np.linalg.norm(rows, axis=1)) + 0.8)
    assert own[0] > own[1]  # what adding to the angle alone would give
    weights = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    found = wh.losses.arcface(rows, weights, [0, 0, 0], margin=0.8, scale=4.0).numpy()
    assert found[0] > found[1] > found[2]


def test_cosface_takes_from_the_cosine() -> None:
    found = wh.losses.cosface(FEATURES, WEIGHTS, LABELS, margin=0.2, scale=8.0)
    np.testing.assert_allclose(found, cross_entropy(8.0 * (near() - 0.2 * HIT), HIT), rtol=1e-10)


def test_curricularface_weighs_what_is_hard_by_a_moving_average() -> None:
    average = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    found = wh.losses.curricularface(FEATURES, WEIGHTS, LABELS, average, margin=0.3, scale=8.0, momentum=0.5)
    own = (near() * HIT).sum(1)
    assert average.numpy() == pytest.approx(0.5 * own.mean())
    target = np.cos(np.arccos(own) + 0.3)
    hard = near() > target[:, None]
    assert hard.any() and not hard.all()
    logits = np.where(HIT, target[:, None], np.where(hard, near() * (average.numpy() + near()), near()))
    np.testing.assert_allclose(found, cross_entropy(8.0 * logits, HIT), rtol=1e-6)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_all_classes_sampled_are_all_classes(in_blocks: bool) -> None:
    table = WEIGHTS.T.reshape(4, 6, WIDTH) if in_blocks else WEIGHTS.T
    found = wh.losses.partial_fc(FEATURES, table, LABELS, CLASSES, [1, 2], margin=0.3, scale=8.0, blocks=4)
    whole = wh.losses.arcface(FEATURES, WEIGHTS, LABELS, margin=0.3, scale=8.0)
    np.testing.assert_allclose(found, whole, rtol=1e-10)


def test_the_batchs_classes_are_always_among_the_sampled() -> None:
    table = tf.Variable(WEIGHTS.T)
    drawn = []
    for step in range(5):
        with tf.GradientTape() as tape:
            loss = wh.losses.partial_fc(FEATURES, table, [0, 1, 2, 3, 4, 5], 12, [1, step], blocks=2)
        slope = tape.gradient(loss, table)
        touched = set(np.flatnonzero(np.abs(tf.convert_to_tensor(slope)).sum(1)))
        assert set(range(6)) <= touched and len(touched) == 12
        drawn.append(frozenset(touched))
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(("sample", "blocks"), [(8, 2), (24, 5), (26, 2)])
def test_too_few_or_unequal_blocks_are_refused(sample: int, blocks: int) -> None:
    with pytest.raises(ProgramError, match="cannot sample the classes with these arguments"):
        wh.losses.partial_fc(FEATURES, WEIGHTS.T, LABELS, sample, [1, 2], blocks=blocks)


@pytest.mark.parametrize("k", [1, 3, 24])
def test_top_k_accuracy_counts_what_is_above(k: int) -> None:
    logits = np.round(near(), 1)  # with ties
    found = wh.losses.top_k_accuracy(logits, LABELS, k)
    np.testing.assert_array_equal(found, tf.math.in_top_k(LABELS, tf.cast(logits, tf.float32), k).numpy())
