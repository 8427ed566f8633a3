"""Scopes inside each other, as users write them: steps and sessions equal one device, or say which op cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.errors import PlanError
from whale.runtime.start import check_replicas

Start = Callable[..., None]
ROWS, WIDTH, CLASSES = 8, 6, 8
SHAPES = [(WIDTH, 8), (8, 8), (8, 8), (8, CLASSES)]


class OneDevice:
    """The scopes of a program that nobody spreads."""

    @staticmethod
    def replica(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    split = stage = pipeline = replica


def layer(h: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    return tf.tanh(h @ w)


def mean_of(h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((h - y) ** 2)


def usual(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2):
        with s.stage(), s.split():
            h = layer(layer(x, w[0]), w[1])
        with s.stage():
            with s.split():
                h = layer(h, w[2])
            return mean_of(h @ w[3], y)


def replica_in_split(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2), s.split():
        h = layer(x, w[0])
        with s.replica():
            h = layer(h, w[1])
        return mean_of(layer(h, w[2]) @ w[3], y)


def split_in_split(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Over another axis, over both, and again over its own."""
    with s.split():
        h = layer(x, w[0])
        with s.split(axis="expert"):
            h = layer(h, w[1])
        with s.split(axis=("tensor", "expert")):
            h = layer(h, w[2])
        with s.split(dim=-1):
            return mean_of(h @ w[3], y)


def split_in_split_of_stages(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2):
        with s.stage(), s.split():
            h = layer(x, w[0])
            with s.split(axis="expert"):
                h = layer(h, w[1])
        with s.stage(), s.split(axis="expert"):
            h = layer(h, w[2])
            with s.split():
                return mean_of(h @ w[3], y)


def stages_in_split(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.split():
        with s.stage():
            h = layer(layer(x, w[0]), w[1])
        with s.stage():
            return mean_of(layer(h, w[2]) @ w[3], y)


def slices(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Slices of the cluster in stages, and ranks of these in scopes inside."""
    first, second = wh.cluster(layout={"average": 2}).slices if s is wh else (None, None)
    with s.replica(), s.pipeline(num_micro_batch=2):
        with s.stage(devices=first):
            with s.replica(devices=[0, 1]):
                h = layer(x, w[0])
            with s.split(devices=[2, 3]):
                h = layer(h, w[1])
        with s.stage(devices=second):
            with s.split(devices=[4, 5, 6]):
                h = layer(h, w[2])
            with s.replica(devices=[6, 7]):
                return mean_of(h @ w[3], y)


def slices_of_a_mesh(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(devices=[0, 1]):
        h = layer(x, w[0])
        with s.split(devices=[0, 2]):
            h = layer(h, w[1])
    with s.split(devices=[1, 3]):
        return mean_of(layer(h, w[2]) @ w[3], y)


def unequal_slices(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2):
        with s.stage(devices=[0, 1, 2, 3]), s.split():
            h = layer(layer(x, w[0]), w[1])
        with s.stage(devices=[4, 5]):
            with s.split():
                h = layer(h, w[2])
            return mean_of(h @ w[3], y)


def overlapping_in_micro_batches(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.pipeline(num_micro_batch=2):
        with s.replica(devices=[0, 1, 2]):
            h = layer(x, w[0])
            with s.split(devices=[1, 2, 3]):
                h = layer(h, w[1])
            h = layer(h, w[2])
        with s.split(devices=[0, 1]):
            return mean_of(h @ w[3], y)


def statistics_before_stages(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Inputs normalised by statistics of the whole batch, which each stage group finds before the micro-batches."""
    with s.replica(), s.pipeline(num_micro_batch=2):
        x = (x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0)
        with s.stage():
            h = layer(layer(x, w[0]), w[1])
        with s.stage():
            return mean_of(layer(h, w[2]) @ w[3], y)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(100 + number)
    return draw.standard_normal((ROWS, WIDTH)), draw.standard_normal((ROWS, CLASSES))


def in_function(nest: Any, scopes: Any, function: Any) -> tuple[list[np.ndarray], Any]:
    """Losses and variables of two steps of SGD with momentum, and the step."""
    weights = [tf.Variable(np.random.default_rng(i).normal(size=n) * 0.4, name=f"w{i}") for i, n in enumerate(SHAPES)]
    moments = [tf.Variable(tf.zeros_like(w), name=f"m{i}") for i, w in enumerate(weights)]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = nest(scopes, weights, x, y)
        for w, m, slope in zip(weights, moments, tape.gradient(loss, weights)):
            m.assign(0.9 * m + slope)
            w.assign_sub(0.3 * m)
        return loss

    spread = function(step)
    losses = [spread(*map(tf.constant, batch(i))).numpy() for i in range(2)]
    return losses + [tf.convert_to_tensor(v).numpy() for v in (*weights, *moments)], spread


def in_session(nest: Any, scopes: Any, opened: Any) -> list[np.ndarray]:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x, y = v1.placeholder(tf.float64, (ROWS, WIDTH)), v1.placeholder(tf.float64, (ROWS, CLASSES))
        values = [np.random.default_rng(i).normal(size=shape) * 0.4 for i, shape in enumerate(SHAPES)]
        weights = [v1.get_variable(f"w{i}", initializer=v, use_resource=True) for i, v in enumerate(values)]
        loss = nest(scopes, weights, x, y)
        train = v1.train.MomentumOptimizer(0.3, 0.9).minimize(loss)
        start = v1.global_variables_initializer()
    with opened(graph=graph) as session:
        session.run(start)
        losses = [session.run([loss, train], dict(zip((x, y), batch(i))))[0] for i in range(2)]
        return losses + session.run(weights)


NESTS = [
    (usual, 8, {"mesh": wh.Mesh(stage=2, data=2, tensor=2)}, 1.0),
    (replica_in_split, 4, {"mesh": wh.Mesh(data=2, tensor=2)}, 0.7),
    (split_in_split, 8, {"mesh": wh.Mesh(data=2, tensor=2, expert=2)}, 1.0),
    (split_in_split_of_stages, 8, {"mesh": wh.Mesh(stage=2, tensor=2, expert=2)}, 1.0),
    (stages_in_split, 4, {}, 1.0),
    (slices, 8, {}, 1.0),
    (slices_of_a_mesh, 4, {"mesh": wh.Mesh(data=2, tensor=2)}, 1.0),
    (unequal_slices, 6, {"mesh": wh.Mesh(tensor=2)}, 1.0),
    (overlapping_in_micro_batches, 4, {}, 1.0),
    (statistics_before_stages, 4, {}, 1.0),
]


@pytest.mark.parametrize(
    ("nest", "count", "config", "divided"), one_of(2, NESTS, several=True), ids=[nest[0].__name__ for nest in NESTS]
)
def test_a_step_equals_one_device(ranks: Start, nest: Any, count: int, config: dict[str, Any], divided: float) -> None:
    wanted, _ = in_function(nest, OneDevice, tf.function)
    ranks(count, **config)
    found, step = in_function(nest, wh, wh.function)
    for number, (a, b) in enumerate(zip(found, wanted)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13, err_msg=str(number))
    check_replicas()
    plan = step.plan(*map(tf.constant, batch(0)))
    assert plan.split_flops_fraction >= divided and plan.logical_bytes > 0


@pytest.mark.parametrize(
    ("nest", "count", "config"),
    one_of(
        3,
        [
            (usual, 8, {"mesh": wh.Mesh(stage=2, data=2, tensor=2)}),
            (slices_of_a_mesh, 4, {"mesh": wh.Mesh(data=2, tensor=2)}),
            (slices, 8, {}),
        ],
        several=True,
    ),
    ids=["usual", "slices of a mesh", "slices"],
)
def test_a_session_equals_one_device(ranks: Start, nest: Any, count: int, config: dict[str, Any]) -> None:
    wanted = in_session(nest, OneDevice, tf.compat.v1.Session)
    ranks(count, **config)
    for a, b in zip(in_session(nest, wh, wh.Session), wanted):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def contrastive(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2):
        with s.stage():
            h = layer(x, w[0])
        with s.stage():
            texts = layer(y, w[2]) @ w[3]
            pairs = tf.matmul(h @ w[1], texts, transpose_b=True, name="every_pair")
            return -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(pairs)))


def normalised_by_weights(s: Any, w: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with s.replica(), s.pipeline(num_micro_batch=2):
        h = x @ w[0]
        h = tf.subtract(h, tf.reduce_mean(h, 0), name="less_the_mean")
        with s.stage():
            h = layer(h, w[1])
        with s.stage():
            return mean_of(layer(h, w[2]) @ w[3], y)


@pytest.mark.parametrize(
    ("nest", "op"), [(contrastive, "every_pair (MatMul)"), (normalised_by_weights, "less_the_mean (Sub)")]
)
def test_the_op_that_wants_all_micro_batches_is_named(ranks: Start, nest: Any, op: str) -> None:
    """It is one of the script's, with what it reads of the whole batch and the variable that this depends on."""
    ranks(4)
    with pytest.raises(PlanError, match="a value of all micro-batches is needed") as refused:
        in_function(nest, wh, wh.function)
    assert f"op: {op}\n" in str(refused.value) and "which depends on matmul" in str(refused.value)
