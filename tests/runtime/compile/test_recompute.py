"""memory.recompute: activations that are computed again for the backward pass, by marks and by bytes."""

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
from tests.memory import peaks_above
from whale.errors import PlanError
from whale.ir.plan import Plan

Start = Callable[..., None]
TYPE = "memory.recompute"


def nothing() -> AbstractContextManager[None]:
    return nullcontext()


class Model:
    """``layers`` times tanh(y @ w) + sin(y), every ``every``-th result marked, in two halves under SGD."""

    def __init__(
        self, function: Any, width: int, layers: int, every: int, dropout: float = 0.0, half: Any = nothing
    ) -> None:
        draw = tf.random.stateless_normal
        start = [draw([width, width], [1, i], dtype=tf.float64) / np.sqrt(width) for i in range(layers)]
        self.weights = [tf.Variable(value) for value in start]
        self.every, self.dropout, self.half = every, dropout, half
        self.step = function(self._step)

    def _layer(self, y: tf.Tensor, i: int) -> tf.Tensor:
        y = tf.tanh(y @ self.weights[i]) + tf.sin(y)
        if self.dropout:
            y = tf.nn.dropout(y, self.dropout, seed=i)
        return wh.checkpoint(y) if self.every and i % self.every == self.every - 1 else y

    def _step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y, middle, end = x, len(self.weights) // 2, len(self.weights)
            with self.half():
                for i in range(middle):
                    y = self._layer(y, i)
            with self.half():
                for i in range(middle, end):
                    y = self._layer(y, i)
                loss = tf.reduce_mean(tf.square(y))
        for slope, weight in zip(tape.gradient(loss, self.weights), self.weights):
            weight.assign_sub(0.1 * slope)
        return loss

    def run(self, x: tf.Tensor, steps: int = 3) -> list[np.ndarray]:
        tf.random.set_seed(7)
        return [*(self.step(x).numpy() for _ in range(steps)), *(w.numpy() for w in self.weights)]


@pytest.mark.parametrize(
    ("count", "config", "dropout", "half"),
    one_of(
        3,
        [
            (1, {}, 0.0, nothing),
            (1, {}, 0.3, nothing),
            (2, {"pipeline.micro_batches": 3}, 0.0, nothing),
            (2, {"memory.zero": 3}, 0.0, nothing),
            (2, {"memory.zero": 3, "pipeline.micro_batches": 2}, 0.3, nothing),
            (2, {}, 0.0, wh.split),
            (2, {"pipeline.micro_batches": 4}, 0.0, wh.stage),
        ],
        several=True,
    ),
)
def test_losses_and_weights_are_the_same(
    ranks: Start, count: int, config: dict[str, Any], dropout: float, half: Any
) -> None:
    x = tf.random.stateless_normal([12, 8], [2, 3], dtype=tf.float64)
    config = {"memory.zero_min_bytes": 0, "batch.random": "global", **config}
    found = []
    for kind in ("", "marked", "auto", *(["stage"] if half is wh.stage else [])):
        ranks(count, **config, **{TYPE: kind})
        model = Model(wh.function, 8, 9, 3, dropout, half)
        found.append(model.run(x))
        assert bool(again(model.step.plan(x))) == bool(kind), kind
        wh.shutdown()
    for values in found[1:]:
        for value, other in zip(values, found[0]):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 if dropout or half is wh.split else 0)


def again(plan: Plan) -> list[str]:
    """What is computed twice."""
    return [name for name in plan.strategies[""] if name.endswith("/whale_again")]


def test_the_collection_of_a_session(ranks: Start) -> None:
    def run(kind: str) -> tuple[list[np.ndarray], list[str]]:
        ranks(2, **{TYPE: kind})
        draw = np.random.default_rng(0).standard_normal
        with tf.Graph().as_default() as graph:
            x = y = tf.compat.v1.placeholder(tf.float64, [8, 4])
            for i in range(6):
                w = tf.compat.v1.get_variable(f"w{i}", initializer=draw((4, 4)), use_resource=True)
                y = tf.tanh(y @ w)
                if i % 2:
                    tf.compat.v1.add_to_collection("checkpoints", y)
            loss = tf.reduce_mean(tf.square(y))
            train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            with wh.Session(graph=graph) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                feeds = {x: draw((8, 4))}
                losses = [session.run([loss, train], feeds)[0] for _ in range(3)]
                return losses, again(session.plan([loss, train], feeds))

    plain, none = run("")
    wh.shutdown()
    losses, names = run("marked")
    np.testing.assert_array_equal(losses, plain)
    # The gradient of the last result depends on nothing behind it: what leads to it is not computed again.
    assert not none and [n for n in names if "Tanh" in n] == ["Tanh_2/whale_again", "Tanh/whale_again"], names


def test_a_scope_of_what_is_computed_again(ranks: Start) -> None:
    x = tf.random.stateless_normal([8, 6], [2, 3], dtype=tf.float64)

    def run(kind: str, held: bool = False) -> tuple[list[np.ndarray], list[str]]:
        ranks(2, **{TYPE: kind})
        weights = [tf.Variable(tf.random.stateless_normal([6, 6], [1, i], dtype=tf.float64)) for i in range(4)]

        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                y = x
                for weight in weights:
                    y = y @ weight
                    with wh.recompute():
                        y = tf.nn.softmax(tf.sin(y) * 2.0)
                y = wh.checkpoint(y) if held else y
                loss = tf.reduce_mean(tf.square(y @ weights[0]))
            for slope, weight in zip(tape.gradient(loss, weights), weights):
                weight.assign_sub(slope)
            return loss

        found = [*(step(x).numpy() for _ in range(3)), *(w.numpy() for w in weights)]
        names = again(step.plan(x))
        wh.shutdown()
        return found, names

    plain, none = run("")
    found, names = run("marked")
    for value, other in zip(found, plain):
        np.testing.assert_array_equal(value, other)
    # The gradient of the last product depends on nothing behind it, so what it reads is held.
    assert not none and sum(n.startswith("Softmax") for n in names) == 3, names
    assert not any("MatMul" in n for n in names)
    with pytest.raises(PlanError, match="one of the two"):
        run("marked", held=True)


@pytest.mark.parametrize(("kind", "action"), [("marked", r"wh\.checkpoint"), ("stage", r"wh\.stage")])
def test_nothing_marked(ranks: Start, kind: str, action: str) -> None:
    ranks(1, **{TYPE: kind})
    with pytest.raises(PlanError, match=action):
        Model(wh.function, 8, 2, 0).step(tf.ones([4, 8], tf.float64))


@pytest.mark.parametrize("micro_batches", one_of(2, [1, 2]))
def test_activations_between_checkpoints_are_not_held(ranks: Start, micro_batches: int) -> None:
    rows, width, layers = 4096, 32, 16
    x = tf.random.stateless_normal([rows, width], [2, 3], dtype=tf.float64)
    one = rows * width * 8 // micro_batches

    def peak_bytes(kind: str) -> int:
        ranks(1, **{TYPE: kind, "pipeline.micro_batches": micro_batches})
        peaks = peaks_above(lambda: partial(Model(wh.function, width, layers, 4).step, x))
        wh.shutdown()
        return peaks[0]

    held, marked, chosen = map(peak_bytes, ("", "marked", "auto"))
    # Of each layer, two tensors are held, or those of one of four segments, and three checkpoints.
    assert held >= 2 * layers * one, (held, one)
    assert marked <= held * 0.5, (marked, held, one)
    assert chosen <= held * 0.6, (chosen, held, one)
