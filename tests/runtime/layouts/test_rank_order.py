"""Ranks of several hosts laid on a mesh by their links: steps are those of one device, in whatever order ranks lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.ir.plan_text import format_plan
from whale.runtime.context import require_current

Start = Callable[..., None]
ROWS, WIDTH, CLASSES = 12, 6, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "state in parts": {"mesh": wh.Mesh(tensor=2, data=3), "memory.zero": 3, "memory.zero_min_bytes": 0},
    "shares": {"mesh": wh.Mesh(tensor=2, data=3), "batch.shares": [1, 2, 3, 4, 2, 0]},
    "micro-batches": {"mesh": wh.Mesh(tensor=2, data=3), "pipeline.micro_batches": 2},
    "stages": {"mesh": wh.Mesh(data=3, stage=2), "pipeline.micro_batches": 2},
}


class Net(tf.Module):
    """Two layers, the second under a split scope, or each in a stage."""

    def __init__(self, function: Any, scopes: tuple[Any, Any]) -> None:
        draw = np.random.default_rng(3)
        self.weights = [tf.Variable(draw.normal(size=s)) for s in ((WIDTH, WIDTH), (WIDTH, CLASSES))]
        self.scopes = scopes
        self.step, self.predict = function(self._step), function(self._logits)

    def _logits(self, x: tf.Tensor) -> tf.Tensor:
        return self._made(x, lambda logits: logits)

    def _made(self, x: tf.Tensor, last: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        with self.scopes[0]():
            h = tf.tanh(x @ self.weights[0])
        with self.scopes[1]():
            return last(h @ self.weights[1])

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._made(x, lambda logits: tf.reduce_mean((logits - y) ** 2))
        for w, slope in zip(self.weights, tape.gradient(loss, self.weights)):
            w.assign_sub(0.1 * slope)
        return loss

    def story(self) -> list[Any]:
        draw = np.random.default_rng(1)
        x, y = draw.normal(size=(ROWS, WIDTH)), draw.normal(size=(ROWS, CLASSES))
        losses = [float(self.step(x, y)) for _ in range(2)]
        return [*losses, self.predict(x).numpy(), *(w.numpy() for w in self.weights)]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_that_of_one_device(ranks: Start, name: str) -> None:
    wanted = Net(tf.function, (contextlib.nullcontext,) * 2).story()
    ranks(6, **{"debug.emulate_network": "hosts=3+3", **SETTINGS[name]})
    context = require_current("a test")
    assert context.rank_order == ((0, 3, 1, 4, 2, 5) if name == "stages" else (0, 1, 3, 4, 2, 5))
    net = Net(wh.function, (wh.stage, wh.stage) if name == "stages" else (contextlib.nullcontext, wh.split))
    for found, value in zip(net.story(), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-14)
    text = format_plan(net.step.plan(np.zeros((ROWS, WIDTH)), np.zeros((ROWS, CLASSES))))
    if name == "stages":
        assert "  stage=2" in text and "0+1+2 -> 3+4+5" in text, text
    else:
        assert "ranks lie by the links between their hosts: 0, 1, 3, 4, 2, 5" in text, text
        assert "0+4 1+2 3+5" in text, text


def test_ranks_stay_in_order_where_asked(ranks: Start) -> None:
    ranks(4, mesh=wh.Mesh(tensor=2, data=2), **{"debug.emulate_network": "hosts=2+2", "mesh.rank_order": "numbers"})
    assert require_current("a test").rank_order == ()
    wh.shutdown()
    ranks(4, mesh=wh.Mesh(tensor=2, data=2), **{"debug.emulate_network": "hosts=2+2"})
    assert require_current("a test").rank_order == (0, 2, 1, 3)
