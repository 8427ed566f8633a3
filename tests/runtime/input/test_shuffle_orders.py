"""A process that joins a run goes on in the orders of the others' datasets, behind full caches too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import whale as wh


def batches(dataset: Any) -> list[list[int]]:
    return [list(map(int, batch)) for batch in dataset]


SHUFFLED: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "shuffle": lambda d: d.shuffle(20, seed=4),
    "two shuffles": lambda d: d.shuffle(4, seed=4).shuffle(5, seed=3),
    "cache": lambda d: d.shuffle(20, seed=4).cache(),
    "cache between": lambda d: d.shuffle(20, seed=4).cache().shuffle(9, seed=5),
    "cache of a repetition": lambda d: d.shuffle(20, seed=4).map(lambda x: x + 1).repeat(2).cache(),
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("name", SHUFFLED)
def test_a_process_that_joins_goes_on_in_the_others_orders(ranks: Callable[..., None], name: str, epochs: int) -> None:
    ranks(2)
    here, there = (wh.shard(SHUFFLED[name](tf.data.Dataset.range(20)).batch(3)) for _ in range(2))
    for _ in range(epochs):
        batches(there)
    here.begun = there.begun
    for _ in range(2):
        assert batches(here) == batches(there)


def test_a_process_that_joins_is_refused_where_it_cannot_know_whether_a_cache_is_full(
    ranks: Callable[..., None],
) -> None:
    ranks(2)
    here, there = (wh.shard(SHUFFLED["cache"](tf.data.Dataset.range(20)).batch(3).take(2)) for _ in range(2))
    batches(there)
    with pytest.raises(wh.ProgramError, match="take behind a cache"):
        here.begun = there.begun
