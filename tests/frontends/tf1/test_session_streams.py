"""Random ops with a seed in a session: their numbers go on from one set of fetches to the next, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

v1 = tf.compat.v1


def _train(session: Callable[[tf.Graph], Any]) -> Sequence[Any]:
    """Losses of steps with dropout; every other one is evaluated apart."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float64, (8, 6))
        w = v1.get_variable("w", initializer=np.linspace(-1, 1, 18).reshape(6, 3), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.dropout(x, rate=0.4, seed=3), w)))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        initialise = v1.global_variables_initializer()
    run = session(graph).run
    run(initialise)
    batches = np.random.default_rng(0).normal(size=(3, 8, 6))
    return [run(fetches, {x: batch}) for batch in batches for fetches in ([loss, train], [loss], [loss, w])]


@pytest.mark.core
@pytest.mark.parametrize("shares", [[5, 3, 0], [0, 8]], ids=str)
def test_streams_go_on_from_run_to_run(ranks: Callable[..., None], shares: list[int]) -> None:
    expected = _train(lambda graph: v1.Session(graph=graph))
    ranks(len(shares), **{"batch.random": "global", "batch.shares": shares})
    found = _train(lambda graph: wh.Session(graph=graph))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b[0], a[0], rtol=1e-12)
    np.testing.assert_allclose(found[-1][1], expected[-1][1], atol=1e-12)
