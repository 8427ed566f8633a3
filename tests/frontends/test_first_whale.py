"""Names of the first Whale: slices of the ranks, and a default for what stands outside of scopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ClusterError, PlanError
from whale.ir.layout import Shard

Start = Callable[..., None]


@pytest.mark.parametrize(
    ("layout", "slices"),
    [
        ("all", [[[0, 1, 2, 3]]]),
        ({"average": 2}, [[[0, 1]], [[2, 3]]]),
        ({"row": 2}, [[[0], [2]], [[1], [3]]]),
        ({"row": 4}, [[[0]], [[1]], [[2]], [[3]]]),
        ({"specific": [[3, 1], [[0], [2]]]}, [[[3, 1]], [[0], [2]]]),
    ],
)
def test_slices(ranks: Start, layout: Any, slices: list) -> None:
    ranks(4)
    assert [[list(group) for group in part] for part in wh.cluster(layout=layout).slices] == slices


@pytest.mark.parametrize("layout", ["some", {"some"}, set(), {"average": 3}, {"row": 0}, {"specific": [[0, 4]]}, {}])
def test_what_cannot_be_cut(ranks: Start, layout: Any) -> None:
    ranks(4)
    with pytest.raises(ClusterError, match=r"cannot cut|do not exist"):
        wh.cluster(layout=layout)


def test_the_default_strategy_adds_no_task_graph(ranks: Start) -> None:
    ranks(2)
    for _ in range(2):
        wh.set_default_strategy(wh.replica())
    weight = tf.Variable(tf.ones((3, 2)))
    plan = wh.function(lambda x: tf.reduce_sum(x @ weight)).plan(tf.ones((4, 3)))
    assert [t.scope for t in plan.task_graphs] == ["(default)"]
    with pytest.raises(PlanError, match="does not accept this strategy"):
        wh.set_default_strategy(wh.split(dim=-1))
    with pytest.raises(PlanError, match="does not accept this strategy"):
        wh.set_default_strategy(wh.stage())


def test_a_split_is_the_default_strategy_of_steps_and_sessions(ranks: Start) -> None:
    ranks(2)
    wh.set_default_strategy(wh.split())
    weight = tf.Variable(tf.ones((3, 4)))
    plan = wh.function(lambda x: tf.reduce_sum(x @ weight)).plan(tf.ones((4, 3)))
    assert [t.scope for t in plan.task_graphs] == ["split_0"]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float64, (4, 3))
        w = tf.compat.v1.get_variable("w", (3, 4), tf.float64, tf.compat.v1.ones_initializer())
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(x @ w)))
        with wh.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train, {x: np.ones((4, 3))})
            assert isinstance(session.plan(train, {x: np.ones((4, 3))}).variables["w"], Shard)
            np.testing.assert_allclose(session.run(w), 1 - 0.1 * 2 * 4 * 3)


def test_devices_by_name_are_ranks(ranks: Start) -> None:
    ranks(2)

    def scopes(*devices: Any) -> set[str]:
        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with wh.replica(devices=devices[0] if len(devices) == 1 else devices):
                return tf.reduce_sum(tf.square(x))

        return {t.scope for t in step.plan(tf.ones((4, 3))).task_graphs}

    assert scopes("/job:worker/replica:0/task:1/device:GPU:0") == {"replica_0(ranks=1)"}
    assert scopes("/job:worker/task:0", "/job:worker/task:1") == {"replica_0"}
    assert scopes(["/device:GPU:1"]) == {"replica_0(ranks=1)"}
    with pytest.raises(PlanError, match="belong to no known rank"):
        wh.replica(["/job:worker/task:0/device:GPU:0", "/job:worker/task:1/device:GPU:1"]).__enter__()
    with pytest.raises(PlanError, match="belong to no known rank"):
        wh.replica("the first one").__enter__()


def test_a_cluster_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_RANK", "1")
    monkeypatch.setenv("WHALE_SIZE", "4")
    monkeypatch.setenv("WHALE_LOCAL_RANK", "1")
    monkeypatch.setenv("WHALE_LOCAL_SIZE", "4")
    with wh.cluster(layout={"average": 2}) as cluster:
        assert cluster.slices == (((0, 1),), ((2, 3),))
