"""A rank's part of a batch: its shape is that of the whole, and it is no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.capture.signature import flatten_arguments
from whale.errors import ProgramError
from whale.runtime.input.local_batches import Brought, rows_of_values

pytestmark = pytest.mark.core


def part(rows: int = 3, sizes: tuple[int, ...] = (5, 3), rank: int = 1) -> wh.ShardedTensor:
    return wh.ShardedTensor(tf.ones([rows, 4]), sizes, rank)


def test_it_has_the_shape_of_the_whole() -> None:
    assert part().shape == (8, 4) and part().dtype == tf.float32 and part().sizes == (5, 3)
    assert repr(part()) == "<wh.ShardedTensor: shape=(8, 4), dtype=float32, rows=[5, 3]>"
    assert part(0, (8, 0)).shape == (8, 4)


def test_rows_that_are_not_the_share() -> None:
    with pytest.raises(ProgramError, match="another number of rows than its share") as caught:
        part(4)
    assert caught.value.facts["given"] == "4 rows on rank 1"


@pytest.mark.parametrize(
    "use",
    [lambda p: p + 1, lambda p: 1 - p, lambda p: -p, lambda p: p[0], lambda p: list(p), lambda p: len(p),
     lambda p: float(p), lambda p: bool(p), lambda p: p > 0, lambda p: tf.ones([8]) * p, lambda p: np.ones(8) @ p,
     lambda p: tf.matmul(p, p), lambda p: tf.reduce_sum(p), lambda p: np.asarray(p), lambda p: np.mean(p),
     lambda p: tf.function(tf.reduce_sum)(p), tf.convert_to_tensor],
)  # fmt: skip
def test_it_is_no_tensor(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ProgramError, match="used as a tensor") as caught:
        use(part())
    assert "rank 1 holds 3 rows" in caught.value.facts["given"]


def test_a_trace_is_for_one_division() -> None:
    def key(value: Any) -> Any:
        return flatten_arguments(lambda x: x, (value,), {}).key

    assert key(part()) == key(part())
    others = [part(3, (3, 5), 0), part(3, (4, 3)), tf.ones([8, 4]), tf.ones([3, 4])]
    assert len({key(part()), *map(key, others)}) == 5


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_of_another_run(ranks: Callable[..., None], count: int) -> None:
    ranks(count)
    with pytest.raises(ProgramError, match="belongs to another run") as caught:
        wh.function(tf.reduce_sum)(part(5, (5, 3), 0))
    assert caught.value.facts["given"].endswith("made for rank 0 of 2")
    assert caught.value.facts["expected"] == "whole batches"


def test_ranks_of_one_process_get_whole_batches(ranks: Callable[..., None]) -> None:
    ranks(2)
    source = tf.data.Dataset.range(7).batch(4)
    assert [x.numpy().tolist() for x in wh.shard(source)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert len(wh.shard(source)) == 2 and wh.shard(source).element_spec == source.element_spec
    with pytest.raises(wh.PlanError, match="names no way of dividing a dataset"):
        wh.shard(source, by="files")
    with tf.Graph().as_default(), pytest.raises(ProgramError, match="for loops in Python"):
        wh.shard(source)


def test_ranks_of_one_process_have_no_batches_of_their_own() -> None:
    with pytest.raises(wh.ConfigError, match="cannot each have a batch of their own"):
        wh.init(wh.Config({"communication.in_process_ranks": 1, "batch.mode": "local"}))


def says(*shapes: tuple[int, ...], dtype: str = "float32") -> Brought:
    return Brought(tuple((dtype, shape) for shape in shapes))


def test_parts_of_one_batch() -> None:
    """The third value has as many rows as the batch on the first rank only: it is equal everywhere."""
    everyone = [says((), (4, 3), (4,), (4, 2)), says((), (2, 3), (4,), (2, 2)), Brought(ended=True)]
    assert rows_of_values(everyone, ["rate", "x", "weight", "y"]) == [None, (4, 2, 0), None, (4, 2, 0)]
    everyone = [says((4, 3), (6,)), says((4, 3), (5,))]
    assert rows_of_values(everyone, ["table", "x"], ["x"]) == [None, (6, 5)]


@pytest.mark.parametrize(
    ("other", "value", "given"),
    [
        (says((4, 2), (4,)), "x", "rank 0 has float32[4, 3], rank 2 has float32[4, 2]"),
        (says((4, 3), (4,), dtype="int32"), "x", "rank 0 has float32[4, 3], rank 2 has int32[4, 3]"),
        (says((4, 3), (5,)), "y", "rank 0 has float32[4], rank 2 has float32[5]"),
        (says((4, 3)), "number of values", "rank 0 has 2, rank 2 has 1"),
    ],
)
def test_parts_that_do_not_fit(other: Brought, value: str, given: str) -> None:
    with pytest.raises(ProgramError, match="do not form one batch") as caught:
        rows_of_values([says((4, 3), (4,)), says((4, 3), (4,)), other], ["x", "y"])
    assert caught.value.facts["value"] == value and caught.value.facts["given"] == given
