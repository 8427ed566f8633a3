"""Batches that are read once more, when ranks go back a step: nothing of what is read next changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from whale.capture.sharded import ShardedTensor
from whale.errors import ClusterError
from whale.runtime.elastic.call_replay import cut_rows_again

pytestmark = pytest.mark.core


def _epochs(dataset) -> list[list[list[int]]]:
    return [[batch.numpy().tolist() for batch in dataset] for _ in range(2)]


def test_batches_before_are_read_again_and_the_next_ones_stay() -> None:
    wh.init()
    try:
        made = tf.data.Dataset.range(12).shuffle(12, seed=3, reshuffle_each_iteration=False).batch(2)
        _, expected = _epochs(wh.shard(made))
        dataset = wh.shard(made)
        list(dataset)  # the first epoch
        iterator = iter(dataset)
        seen = [next(iterator).numpy().tolist() for _ in range(3)]
        dataset.divide_again()
        for number in (2, 1, 2):  # the call that is made again, the step before it, and the call
            assert [leaf.numpy().tolist() for leaf in iterator.read_again(number)] == [seen[number]]
        assert seen + [batch.numpy().tolist() for batch in iterator] == expected
    finally:
        wh.shutdown()


@pytest.mark.parametrize(
    ("size", "shares", "again"), [(2, (), False), (2, (2, 2), False), (2, (3, 1), True), (3, (), True), (1, (), True)]
)
def test_rows_of_a_part_are_read_again_where_they_are_others_now(size: int, shares: tuple, again: bool) -> None:
    context: Any = SimpleNamespace(size=size, config={"batch.shares": shares})
    part = ShardedTensor(tf.zeros([2, 5]), (2, 2), 0)
    part.source = (SimpleNamespace(read_again=lambda number: ["not this", f"of batch {number}"]), 7, 1)
    assert cut_rows_again(context, part) == ("of batch 7" if again else part)


def test_rows_that_nobody_can_read_again_are_an_error() -> None:
    context: Any = SimpleNamespace(size=3, config={"batch.shares": ()})
    with pytest.raises(ClusterError, match="are lost with the rank"):
        cut_rows_again(context, ShardedTensor(tf.zeros([2, 5]), (2, 2), 0))
