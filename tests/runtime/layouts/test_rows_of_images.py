"""Convolutions under ``wh.split(dim=1)``: rows of images are divided, and neighbours exchange what windows need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.oracle.metric import difference, limit
from whale.ir.layout import Shard

SIZE, DEPTH, ROWS = 12, 3, 4


def train(function: Any, scope: Any) -> tuple[dict[str, np.ndarray], Any]:
    """Three steps of overlapping, strided, depthwise and pointwise convolutions; values, and the step."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "first": (3, 3, DEPTH, 4),
        "down": (5, 3, 4, 6),
        "depth": (3, 3, 6, 1),
        "point": (1, 1, 6, 4),
    }
    shapes["out"] = (4, 2)
    w = {name: tf.Variable(0.3 * rng.normal(size=shape), name=name) for name, shape in shapes.items()}

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with scope():
                h = tf.nn.relu(tf.nn.conv2d(x, w["first"], 1, "SAME") + 0.1)
                h = tf.tanh(tf.nn.conv2d(h, w["down"], 2, "SAME"))
                h = h - tf.reduce_mean(h, axis=[0, 1, 2], keepdims=True)
                h = tf.nn.depthwise_conv2d(h, w["depth"], (1, 1, 1, 1), "SAME")
                h = tf.nn.avg_pool2d(tf.nn.conv2d(h, w["point"], 1, "SAME"), 2, 2, "VALID")
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.reduce_mean(h, axis=[1, 2]), w["out"]) - y))
        slopes = tape.gradient(loss, list(w.values()))
        for variable, slope in zip(w.values(), slopes):
            variable.assign_sub(0.1 * slope)
        return loss

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(number)
        return draw.normal(size=(ROWS, SIZE, SIZE, DEPTH)), draw.normal(size=(ROWS, 2))

    found = {f"loss/{i}": np.asarray(step(*batch(i))) for i in range(3)}
    if hasattr(step, "plan"):
        return found | {f"variable/{n}": v.numpy() for n, v in w.items()}, step.plan(*batch(0))
    return found | {f"variable/{n}": v.numpy() for n, v in w.items()}, None


@pytest.mark.parametrize(("count", "dim"), [(2, 1), (3, 1), (2, 2)])
def test_rows_or_columns_of_images_are_divided(ranks: Callable[..., None], count: int, dim: int) -> None:
    expected, _ = train(tf.function, contextlib.nullcontext)
    ranks(count)
    found, plan = train(wh.function, partial(wh.split, dim=dim))
    worst = difference(expected, found, 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert plan.split_flops_fraction > 0.99 and not plan.variables
    wide = [
        p for s in plan.strategies[""].values() for p in s.inputs if isinstance(p, Shard) and p is not p.without_halo
    ]
    assert len(wide) >= 6 and {p.dim for p in wide} == {dim}, "three convolutions, forward and backward"
    exchanged = [
        r for r in plan.reshards if isinstance(r.target, Shard) and r.target is not r.target.without_halo and r.bytes
    ]
    assert exchanged and all(r.source == r.target.without_halo for r in exchanged), "rows come from neighbours"


def test_too_few_rows(ranks: Callable[..., None]) -> None:
    ranks(4)
    w = tf.Variable(np.ones((3, 3, 2, 2)), name="w")

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.split(dim=1):
            return tf.nn.conv2d(x, w, 1, "SAME")

    expected = r"Conv2D(.|\n)*dim=1 of \[4, 3, 8, 2\], of size 3 over 4 ranks(.|\n)*4 or more"
    with pytest.raises(wh.PlanError, match=expected):
        step(np.ones((4, 3, 8, 2)))
