"""Classifiers of many classes, which are split: margins as users write them, weights that are made from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import RANKS, Line, Scopes, sgd, weight

ROWS, INPUTS, WIDTH, CLASSES, SMALL = 64, 64, 128, 200_000, 800
MARGIN, SCALE, LOW_RANK = 0.5, 16.0, 8
FLOAT = 4

Logits = Callable[["Classifier", tf.Tensor, tf.Tensor], tf.Tensor]


class Classifier:
    """Features under replica, a head whose classes are split."""

    def __init__(self, scopes: Scopes, dtype: Any, head: Logits, classes: int, more: Callable[..., Any]) -> None:
        self.scopes, self.dtype, self.head, self.classes = scopes, dtype, head, classes
        self.features = weight(0, INPUTS, WIDTH, dtype=dtype)
        self.weight = weight(1, WIDTH, classes, dtype=dtype)
        self.more = list(more(classes, dtype))
        self.variables = [self.features, self.weight, *self.more]

    def batch(self, number: int) -> tuple[Any, ...]:
        generator = np.random.default_rng(number)
        x = tf.cast(generator.standard_normal((ROWS, INPUTS), np.float32), self.dtype)
        return x, tf.constant(generator.integers(self.classes, size=ROWS), tf.int32)

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.replica():
                h = tf.tanh(x @ self.features)
            with self.scopes.split():
                logits = self.head(self, h, y)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        sgd(loss, tape, self.variables)
        return loss


class OfLosses(Classifier):
    """The same with a loss of ``wh.losses``; weights as it wants them."""

    def __init__(self, scopes: Scopes, dtype: Any, loss: str, classes: int) -> None:
        super().__init__(scopes, dtype, one_hot, classes, nothing)
        self.loss = loss
        self.count = tf.Variable(0, trainable=False)
        self.average = tf.Variable(tf.zeros([], dtype), trainable=False)
        if loss == "partial_fc":
            self.weight = weight(1, classes, WIDTH, dtype=dtype)
            self.variables = [self.features, self.weight]

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        sample = max(self.classes // 10, 8 * ROWS)
        losses: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
            "arcface": lambda h: wh.losses.arcface(h, self.weight, y, scale=SCALE, label_smoothing=0.1),
            "cosface": lambda h: wh.losses.cosface(h, self.weight, y, scale=SCALE),
            "curricularface": lambda h: wh.losses.curricularface(h, self.weight, y, self.average, scale=SCALE),
            "partial_fc": lambda h: wh.losses.partial_fc(h, self.weight, y, sample, [7, self.count], scale=SCALE),
        }
        with tf.GradientTape() as tape:
            with self.scopes.replica():
                h = tf.tanh(x @ self.features)
            with self.scopes.split():
                loss = tf.reduce_mean(losses[self.loss](h))
        sgd(loss, tape, self.variables)
        self.count.assign_add(1)
        return loss


class Right(Classifier):
    """How often the class of a row is among the first five, without training."""

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with self.scopes.replica():
            h = tf.tanh(x @ self.features)
        with self.scopes.split():
            return tf.reduce_mean(wh.losses.top_k_accuracy(h @ self.weight, y, 5))


def cosine(model: Classifier, h: tf.Tensor) -> tf.Tensor:
    return tf.nn.l2_normalize(h, 1) @ tf.nn.l2_normalize(model.weight, 0)


def one_hot(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """ArcFace with a one-hot margin."""
    near = cosine(model, h)
    hit = tf.one_hot(y, model.classes, dtype=model.dtype)
    return SCALE * tf.where(hit > 0, tf.cos(tf.acos(tf.clip_by_value(near, -0.9, 0.9)) + MARGIN), near)


def tensor_scatter(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """CosFace with a margin that is written where the label is."""
    near = cosine(model, h)
    at = tf.stack([tf.range(ROWS), y], 1)
    return SCALE * tf.tensor_scatter_nd_update(near, at, tf.gather_nd(near, at) - MARGIN)


def scatter_sub(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    at = tf.stack([tf.range(ROWS), y], 1)
    return SCALE * tf.tensor_scatter_nd_sub(cosine(model, h), at, tf.fill([ROWS], tf.cast(MARGIN, model.dtype)))


def normalised(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return h @ tf.nn.l2_normalize(model.weight, 0)


def doubled(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return h @ (model.weight * 2)


def low_rank(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """LoRA, added to the weight."""
    down, up = model.more
    return h @ (model.weight + 0.5 * (down @ up))


def low_rank_beside(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """LoRA, beside the product."""
    down, up = model.more
    return h @ model.weight + 0.5 * ((h @ down) @ up)


def weight_norm(model: Classifier, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    (size,) = model.more
    return h @ (size * model.weight / tf.norm(model.weight, axis=0, keepdims=True))


def of_low_rank(classes: int, dtype: Any) -> list[tf.Variable]:
    return [weight(2, WIDTH, LOW_RANK, dtype=dtype), weight(3, LOW_RANK, classes, dtype=dtype)]


def of_sizes(classes: int, dtype: Any) -> list[tf.Variable]:
    return [weight(2, classes, dtype=dtype)]


def nothing(classes: int, dtype: Any) -> list[tf.Variable]:
    return []


def wanted(more: int = 0) -> int:
    """Features there and their slopes back, labels, maxima and sums of the softmax, the dense layer's gradient."""
    rows = 2 * ROWS * WIDTH * FLOAT + ROWS * FLOAT
    sums = 2 * (INPUTS * WIDTH * FLOAT + 3 * ROWS * FLOAT + FLOAT)
    return (RANKS - 1) * (rows + sums + 2 * more)


def lines() -> list[Line]:
    """The rows about classifiers."""
    heads: list[tuple[str, Logits, Callable[..., Any], int]] = [
        ("ArcFace, one-hot margin", one_hot, nothing, 0),
        ("CosFace, tensor_scatter_nd_update margin", tensor_scatter, nothing, ROWS * FLOAT),
        ("CosFace, tensor_scatter_nd_sub margin", scatter_sub, nothing, 0),
        ("x @ l2_normalize(W)", normalised, nothing, 0),
        ("x @ (W * 2)", doubled, nothing, 0),
        ("x @ (W + A @ B)", low_rank, of_low_rank, WIDTH * LOW_RANK * FLOAT),
        ("x @ W + (x @ A) @ B", low_rank_beside, of_low_rank, WIDTH * LOW_RANK * FLOAT),
        ("weight norm", weight_norm, of_sizes, 0),
    ]
    found = [
        Line(
            f"{name}, {CLASSES:,} classes",
            partial(Classifier, head=head, classes=CLASSES, more=more),
            wanted(moved),
            small=partial(Classifier, head=head, classes=SMALL, more=more),
        )
        for name, head, more, moved in heads
    ]
    own = [("arcface", 3), ("cosface", 1), ("curricularface", 1), ("partial_fc", 0)]
    found += [
        Line(
            f"wh.losses.{name}, {CLASSES:,} classes",
            partial(OfLosses, loss=name, classes=CLASSES),
            wanted(moved * ROWS * FLOAT),
            small=partial(OfLosses, loss=name, classes=SMALL),
        )
        for name, moved in own
    ]
    accumulated = {"pipeline.micro_batches": 2}
    found += [
        replace(line, name=line.name.replace(", 200", ", 2 micro-batches, 200"), config=accumulated)
        for line in found
        if line.name.startswith(("CosFace, tensor_scatter_nd_update", "wh.losses.arcface"))
    ]
    one_way = (RANKS - 1) * (ROWS * WIDTH * FLOAT + ROWS * FLOAT + 2 * 2 * ROWS * FLOAT)
    right = partial(Right, head=one_hot, more=nothing)
    found.append(
        Line(
            f"wh.losses.top_k_accuracy, {CLASSES:,} classes",
            partial(right, classes=CLASSES),
            one_way,
            small=partial(right, classes=SMALL),
        )
    )
    return found
