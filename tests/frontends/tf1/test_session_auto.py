"""Stages that are looked for in a session, whose graph a MonitoredSession has finalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import PlanError

v1 = tf.compat.v1


def steps(session: Callable[..., Any], rows: int) -> list[float]:
    """The losses of three steps of four products."""
    draw = np.random.default_rng(0)
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float64, [None, 8])
        h = x
        for n in range(4):
            w = v1.get_variable(f"w{n}", initializer=draw.normal(size=(8, 8)) / 3, use_resource=True)
            h = tf.tanh(h @ w)
        loss = tf.reduce_mean(tf.square(h - 1))
        train = v1.train.AdamOptimizer(0.01).minimize(loss)
        begin = v1.global_variables_initializer()
    graph.finalize()
    with session(graph=graph) as running:
        running.run(begin)
        return [running.run([loss, train], {x: draw.normal(size=(rows, 8))})[0] for _ in range(3)]


def test_stages_with_as_many_micro_batches_as_are_asked_for(
    ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = steps(v1.Session, 8)
    ranks(4, **{"mesh.auto_parallel": True, "pipeline.stages": 2, "pipeline.micro_batches": 2})
    np.testing.assert_allclose(steps(wh.Session, 8), alone, rtol=1e-10)
    assert "pipeline of 2 stages, 2 micro-batches" in capsys.readouterr().err


def test_why_there_is_no_such_pipeline_is_said(ranks: Callable[..., None]) -> None:
    ranks(4, **{"mesh.auto_parallel": True, "pipeline.stages": 2, "pipeline.micro_batches": 2})
    with pytest.raises(PlanError, match="6 rows cannot be divided into 2 micro-batches of 2 replicas"):
        steps(wh.Session, 6)
