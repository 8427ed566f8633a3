"""Sums and averages of two ranks that bring the same tensors, without a process beside the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale.frontends.horovod import reductions, sums

VALUE = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.fixture(autouse=True)
def two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that call the same with the same."""
    monkeypatch.setattr(sums, "require_context", lambda call, process_set: SimpleNamespace(size=2))
    monkeypatch.setattr(sums, "make_key", lambda context, kind, name: f"{kind}/{name}")
    monkeypatch.setattr(sums.tensors, "all_gather", lambda context, value, key: tf.concat([value, value], 0))
    monkeypatch.setattr(
        sums.tensors, "all_reduce", lambda context, values, key, op: [v + v if op == "sum" else v for v in values]
    )


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "slices"])
@pytest.mark.parametrize(
    ("asked", "times"), [({}, 1), ({"op": reductions.Average}, 1), ({"op": reductions.Sum}, 2)], ids=str
)
def test_an_average_is_not_the_sum(sparse: bool, asked: dict[str, Any], times: int) -> None:
    given = tf.IndexedSlices(tf.constant(VALUE), tf.range(3), tf.constant([3, 2])) if sparse else tf.constant(VALUE)
    found = sums.allreduce(given, **asked)
    assert isinstance(found, tf.IndexedSlices) == sparse
    np.testing.assert_array_equal(tf.convert_to_tensor(found), times * VALUE)
