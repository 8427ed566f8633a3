"""float16 in sessions: scaled losses, steps that overflow, and every optimizer of version 1 that can be skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.errors import PlanError
from whale.runtime import loss_scale

Start = Callable[..., None]
v1 = tf.compat.v1
FLOAT16 = {"precision.compute_dtype": "float16"}


@pytest.fixture(autouse=True)
def _quick_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that adapts begins with 1024, and grows after two steps."""
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 1024.0)
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)


OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adadelta": lambda: v1.train.AdadeltaOptimizer(0.1),
    "proximal": lambda: v1.train.ProximalGradientDescentOptimizer(0.1, l1_regularization_strength=0.01),
}


class Net:
    """Rows of a table through two products, in float32."""

    def __init__(self, optimizer: Callable[[], Any], scopes: Any = (lambda: tf.name_scope("a"),) * 2) -> None:
        draw = np.random.default_rng(3).standard_normal
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, 12])
            self.y = v1.placeholder(tf.float32, [None, 4])
            rows, first, second = (
                v1.get_variable(name, initializer=(0.3 * draw(shape)).astype(np.float32), use_resource=True)
                for name, shape in (("rows", (5, 12)), ("first", (12, 24)), ("second", (24, 4)))
            )
            with scopes[0]():
                h = tf.nn.relu((self.x + tf.gather(rows, tf.argmax(self.x, 1) % 5)) @ first)
            with scopes[1]():
                self.loss = tf.reduce_mean(tf.square(h @ second - self.y))
            self.step = v1.train.get_or_create_global_step()
            self.train = optimizer().minimize(self.loss, self.step)
            self.start, self.variables = v1.global_variables_initializer(), v1.global_variables()

    def batch(self, overflows: bool = False) -> dict[Any, np.ndarray]:
        """16 rows; only the last one overflows in float16."""
        draw = np.random.default_rng(0).standard_normal
        x, y = draw((16, 12)).astype(np.float32), draw((16, 4)).astype(np.float32)
        x[15] *= 7e4 if overflows else 1.0
        return {self.x: x, self.y: y}


@pytest.mark.parametrize("name", one_of(3, OPTIMIZERS))
def test_a_run_that_overflows_changes_nothing(ranks: Start, name: str) -> None:
    plain = Net(OPTIMIZERS[name])
    with v1.Session(graph=plain.graph) as session:
        session.run(plain.start)
        for _ in range(2):
            session.run(plain.train, plain.batch())
        expected = session.run(plain.variables)
    ranks(2, **FLOAT16)
    net, scales = Net(OPTIMIZERS[name]), []
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        for overflows in (False, True, False):
            before = session.run(net.variables)
            session.run(net.train, net.batch(overflows))
            scales.append(wh.loss_scale())
            for value, other in zip(session.run(net.variables), before):
                assert np.isfinite(value).all() and np.array_equal(value, other) == overflows
        found = session.run(net.variables)
        assert session.run(net.step) == 2
    assert scales == [1024, 512, 512]
    for value, other in zip(found, expected):
        np.testing.assert_allclose(value, other, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(
    ("count", "config", "scope"),
    [(2, {"pipeline.micro_batches": 2}, wh.stage), (2, {"memory.zero": 1, "memory.zero_min_bytes": 0}, wh.replica)],
)
def test_a_run_that_overflows_on_one_rank_changes_nothing_on_others(
    ranks: Start, count: int, config: Any, scope: Any
) -> None:
    ranks(count, **FLOAT16, **config)
    net = Net(OPTIMIZERS["adam"], (scope, scope))
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        for overflows in (False, True, False):
            before = session.run(net.variables)
            session.run(net.train, net.batch(overflows))
            for value, other in zip(session.run(net.variables), before):
                assert np.isfinite(value).all() and np.array_equal(value, other) == overflows


def test_gradients_of_losses_that_were_not_scaled_are_refused(ranks: Start) -> None:
    early = Net(OPTIMIZERS["sgd"])
    ranks(1, **FLOAT16)
    with wh.Session(graph=early.graph) as session:
        session.run(early.start)
        with pytest.raises(PlanError, match="without loss scaling"):
            session.run(early.train, early.batch())


def test_updates_that_cannot_be_skipped_are_refused(ranks: Start) -> None:
    ranks(1, **FLOAT16)
    net = Net(lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.9))
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        with pytest.raises(PlanError, match="ApplyRMSProp"):
            session.run(net.train, net.batch())
