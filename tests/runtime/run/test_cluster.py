"""wh.cluster: slices of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ClusterError, PlanError

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


@pytest.mark.parametrize("layout", ["some", {"average": 3}, {"row": 0}, {"specific": [[0, 4]]}, {}])
def test_what_cannot_be_cut(ranks: Start, layout: Any) -> None:
    ranks(4)
    with pytest.raises(ClusterError, match=r"cannot be cut|do not exist"):
        wh.cluster(layout=layout)


def test_the_default_strategy_adds_no_task_graph(ranks: Start) -> None:
    ranks(2)
    for _ in range(2):
        wh.set_default_strategy(wh.replica())
    weight = tf.Variable(tf.ones((3, 2)))
    plan = wh.function(lambda x: tf.reduce_sum(x @ weight)).plan(tf.ones((4, 3)))
    assert [t.scope for t in plan.task_graphs] == ["(default)"]
    with pytest.raises(PlanError, match="outside of scopes"):
        wh.set_default_strategy(wh.split())
