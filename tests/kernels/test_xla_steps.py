"""Steps with ``jit_compile=True``: clusters of each rank compute what XLA computes of the whole on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.ir.ops import CONVOLUTIONS
from whale.kernels import clusters
from whale.kernels.xla import count_compiled
from whale.runtime.compile import compile

Tensor = Any
ROWS, LENGTH, WIDTH, WORDS = 8, 4, 8, 16
DRAW = np.random.default_rng(0)


def _variable(*shape: int) -> tf.Variable:
    return tf.Variable(DRAW.normal(size=shape) / 4)


class Gpt(tf.Module):
    """Two blocks with causal attention; dropout of which the seed decides."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.table, self.places, self.head = _variable(WORDS, WIDTH), _variable(LENGTH, WIDTH), _variable(WIDTH, WORDS)
        self.blocks = [
            [_variable(WIDTH, 3 * WIDTH), _variable(WIDTH, WIDTH), _variable(WIDTH, 16), _variable(16, WIDTH)]
            for _ in range(2)
        ]

    def inputs(self) -> tuple[Tensor, Tensor]:
        words = DRAW.integers(0, WORDS, (ROWS, LENGTH + 1))
        return tf.constant(words[:, :-1]), tf.constant(words[:, 1:])

    def loss(self, x: Tensor, y: Tensor, scope: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        h = losses = y
        for i, (mixed, back, up, down) in enumerate(self.blocks):
            with scope():
                h = tf.gather(self.table, x) + self.places if i == 0 else h
                h += self.attend(self.norm(h), mixed) @ back
                h += tf.nn.gelu(self.norm(h) @ up) @ down
                if self.dropout:
                    h = tf.nn.dropout(h, 0.25, seed=i)
                if i == 1:
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.norm(h) @ self.head)
        return tf.reduce_mean(losses)

    def attend(self, h: Tensor, mixed: tf.Variable) -> Tensor:
        q, k, v = (
            tf.transpose(tf.reshape(t, (-1, LENGTH, 2, WIDTH // 2)), (0, 2, 1, 3)) for t in tf.split(h @ mixed, 3, -1)
        )
        later = tf.constant(np.triu(np.full((LENGTH, LENGTH), -1e9), 1))
        found = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) + later), v)
        return tf.reshape(tf.transpose(found, (0, 2, 1, 3)), (-1, LENGTH, WIDTH))

    def norm(self, h: Tensor) -> Tensor:
        mean, variance = tf.nn.moments(h, -1, keepdims=True)
        return (h - mean) * tf.math.rsqrt(variance + 1e-6)


class Convolutions(tf.Module):
    """Convolutions with batch normalisation and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = [_variable(3, 3, 4, 8), _variable(3, 3, 8, 8)]
        self.top = _variable(8, 5)

    def inputs(self) -> tuple[Tensor, Tensor]:
        return tf.constant(DRAW.normal(size=(ROWS, 4, 4, 4))), tf.constant(DRAW.integers(0, 5, ROWS))

    def loss(self, x: Tensor, y: Tensor, scope: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        for one in self.filters:
            x = tf.nn.conv2d(x, one, 1, "SAME")
            mean, variance = tf.nn.moments(x, (0, 1, 2))
            x = tf.nn.silu((x - mean) * tf.math.rsqrt(variance + 1e-3))
        pooled = tf.nn.avg_pool2d(x, 2, 2, "VALID")
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.reduce_mean(pooled, (1, 2)) @ self.top)
        )


class Recurrent(tf.Module):
    """A loop of known length that keeps its states, and one that ends when a value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = _variable(2 * WIDTH, 4 * WIDTH)

    def inputs(self) -> tuple[Tensor, Tensor]:
        return tf.constant(DRAW.normal(size=(ROWS, LENGTH, WIDTH))), tf.constant(DRAW.normal(size=(ROWS, WIDTH)))

    def loss(self, x: Tensor, y: Tensor, scope: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        h = c = tf.zeros_like(y)
        for step in tf.unstack(x, axis=1)[:2]:
            h, c = self.turn(step, h, c)
        gates = self.gates + 0.0
        far = lambda n, h, c: tf.logical_and(n < 9, tf.reduce_sum(tf.square(h)) > 1e-3)  # noqa: E731
        near = lambda n, h, c: (n + 1, 0.8 * tf.tanh(h @ gates[:WIDTH, :WIDTH]), c)  # noqa: E731
        _, h, c = tf.while_loop(far, near, (0, h, c), maximum_iterations=9)
        return tf.reduce_mean(tf.square(h + c - y))

    def turn(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = tf.split(tf.concat([x, h], -1) @ self.gates, 4, -1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c


def _descend(net: Any, x: Tensor, y: Tensor, scope: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    with tf.GradientTape() as tape:
        loss = net.loss(x, y, scope)
    for weight, slope in zip(net.trainable_variables, tape.gradient(loss, net.trainable_variables)):
        weight.assign_sub(0.5 * tf.convert_to_tensor(slope))
    return loss


def train(net: Any, x: Tensor, y: Tensor, function: Callable[..., Any], scope: Any = nullcontext) -> list[Any]:
    """Returns the losses of two steps, and the weights behind them; the net gets its first weights again."""
    first = [v.numpy() for v in net.variables]
    step = function(lambda x, y: _descend(net, x, y, scope), autograph=False)
    found = [[float(step(x, y)) for _ in range(2)], *[v.numpy() for v in net.variables]]
    for v, value in zip(net.variables, first):
        v.assign(value)
    return [*found, step]


def compare(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "scope", "products", "config"),
    one_of(
        2,
        [
            pytest.param(Gpt, wh.replica, True, {"communication.bucket_bytes": 4096}, id="gpt"),
            pytest.param(Convolutions, wh.replica, False, {"batch.shares": [5, 3]}, id="convolutions"),
            pytest.param(Gpt, wh.stage, True, {"pipeline.micro_batches": 2}, id="gpt-stages"),
            pytest.param(Gpt, wh.split, True, {}, id="gpt-split"),
            pytest.param(Recurrent, wh.replica, False, {}, id="recurrent"),
            pytest.param(
                Gpt,
                wh.replica,
                True,
                {"memory.zero": 3, "memory.zero_min_bytes": 0, "memory.recompute": "auto"},
                id="gpt-zero-recompute",
            ),
        ],
    ),
)
def test_steps_equal_one_device_with_xla(
    ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], scope: Any,
    products: bool, config: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.setattr(clusters, "LEAST_BYTES", 0)
    if products:  # as on GPUs, so that clusters are large
        monkeypatch.setattr(clusters, "_is_faster_otherwise", lambda graph, node: node.op in CONVOLUTIONS)
    net = make()
    x, y = net.inputs()
    # What XLA makes of the whole is compared in test_xla.py; it differs by rounding.
    expected = train(net, x, y, partial(tf.function, jit_compile=make is Recurrent))
    ranks(2, **{"batch.random": "global", "batch.norm_statistics": "batch", "mesh.plan_cache": "", **config})
    found = train(net, x, y, partial(wh.function, jit_compile=True), scope)
    compare(found, expected)
    programs = found[-1]._step((x, y), {}).compiled.ranks
    assert all(count_compiled(one) >= 2 for one in programs)


def test_masks_are_drawn_from_the_streams_that_they_have_without_xla(
    ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "LEAST_BYTES", 0)
    ranks(2, **{"batch.random": "global", "mesh.plan_cache": ""})
    net = Gpt(dropout=True)
    x, y = net.inputs()
    expected, found = (train(net, x, y, partial(wh.function, jit_compile=jit)) for jit in (None, True))
    compare(found, expected)


def test_without_xla_a_run_says_so_once(
    ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile, "read_xla_kernels", lambda on_gpu: None)
    ranks(1)
    x = tf.ones((64, 64))
    for _ in range(2):
        step = wh.function(lambda x: tf.tanh(tf.exp(x) * 0.5) + x, jit_compile=True)
        np.testing.assert_allclose(step(x), np.tanh(np.exp(1) * 0.5) + np.ones((64, 64)), rtol=1e-6)
    said = "TensorFlow has no XLA for processors here: functions with jit_compile=True run without XLA"
    assert capsys.readouterr().err.count(said) == 1
