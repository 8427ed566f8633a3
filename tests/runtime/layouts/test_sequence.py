"""``wh.split(sequence=1)``: what lies between products is divided along the sequence, and all equals one device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.oracle.metric import difference, limit
from whale.errors import PlanError
from whale.ir.layout import P_SUM, B, Placement, Shard
from whale.ir.plan import Plan
from whale.tools import models

ROWS, LENGTH, WIDTH, HEADS = 3, 8, 12, 4


class Block:
    """A transformer's layer with dropout, a normalisation, and a mean square; ``turned``: the sequence comes first."""

    def __init__(self, function: Any = tf.function, scope: Any = contextlib.nullcontext, turned: bool = False):
        draw = np.random.default_rng(3)
        self.weights: dict[str, tf.Variable] = {}
        self.turned = turned

        def weight(name: str, shape: Any) -> tf.Variable:
            if name not in self.weights:
                self.weights[name] = tf.Variable(0.3 * draw.normal(size=shape), name=name.replace("/", "_"))
            return self.weights[name]

        def turn(t: tf.Tensor) -> tf.Tensor:
            return tf.transpose(t, (1, 0, 2)) if turned else t

        def predict(x: tf.Tensor) -> tf.Tensor:
            normed = models.norm(weight, "norm1", x)
            mixed = turn(models.attention(weight, "attention", turn(normed), HEADS, causal=True))
            x += tf.nn.experimental.stateless_dropout(mixed, 0.2, seed=[4, 5])
            inner = models.feed_forward(weight, "inner", models.norm(weight, "norm2", x), 4 * WIDTH, tf.nn.gelu)
            last = models.norm(weight, "norm3", x + inner)
            return tf.matmul(last, weight("last", (WIDTH, 2 * WIDTH)))

        with scope():
            predict(self.batch(0)[0])  # makes the weights

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with scope():
                    found = predict(x)
                with scope():  # nothing here is divided along the sequence
                    found = tf.reduce_mean(tf.square(found - y))
            slopes = tape.gradient(found, list(self.weights.values()))
            for variable, slope in zip(self.weights.values(), slopes):
                variable.assign_sub(0.1 * slope)
            return found

        self.step = function(step)

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(number)
        shape = (LENGTH, ROWS) if self.turned else (ROWS, LENGTH)
        return draw.normal(size=(*shape, WIDTH)), draw.normal(size=(*shape, 2 * WIDTH))

    def train(self) -> dict[str, np.ndarray]:
        found = {f"loss/{i}": np.asarray(self.step(*self.batch(i))) for i in range(3)}
        return found | {name: v.numpy() for name, v in self.weights.items()}


def activations_moved(plan: Plan) -> Counter[tuple[str, str]]:
    """Sums, and tensors that are brought together, as large as the activations between products."""
    large = [r for r in plan.reshards if r.bytes >= (plan.size - 1) * ROWS * LENGTH * WIDTH * 8]

    def kind(p: Placement) -> str:
        return f"dimension {p.dim}" if isinstance(p, Shard) else str(p)

    return Counter((kind(r.source), kind(r.target)) for r in large if r.source == P_SUM or r.target == B)


@pytest.mark.parametrize(("count", "turned"), one_of(2, [(3, True), (2, False)], several=True))
def test_a_block_is_divided_along_the_sequence(ranks: Callable[..., None], count: int, turned: bool) -> None:
    expected = Block(turned=turned).train()
    dim = 0 if turned else 1
    ranks(count)
    block = Block(wh.function, partial(wh.split, sequence=dim), turned)
    worst = difference(expected, block.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = block.step.plan(*block.batch(0))
    # Two sums forward and three backward; what is before three products, and the gradients behind two of them.
    along = f"dimension {dim}"
    assert activations_moved(plan) == {("P(sum)", along): 5, (along, "B"): 5}
    whole = Block(wh.function, wh.split, turned).step.plan(*block.batch(0))
    assert not any(along in kinds for kinds in activations_moved(whole))
    assert plan.variables == whole.variables


def test_mistakes_name_what_to_do(ranks: Callable[..., None]) -> None:
    ranks(2)
    with pytest.raises(PlanError, match=r"sequence=2(.|\n)*0 for \[sequence, batch, features\]"), wh.split(sequence=2):
        pass
    weight = tf.Variable(np.ones((4, 6)))

    @wh.function
    def flat(x: tf.Tensor) -> tf.Tensor:
        with wh.split(sequence=1):
            return tf.nn.relu(tf.matmul(x, weight))

    with pytest.raises(PlanError, match=r"cannot be divided along their sequence(.|\n)*no tensor of rank 3"):
        flat(np.ones((4, 4)))
