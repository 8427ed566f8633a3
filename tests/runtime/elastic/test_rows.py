"""Batches that are read once more, when ranks go back a step: nothing of what is read next changes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import whale as wh

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
