"""What rows on every rank save the busiest rank: ``python -m benchmarks.giant hot`` prints it below its table.

Which rows these are is what ``wh.layers.hot_ids`` finds in a sample of batches, for 8 tables of bags.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import LARGE_BAGS
from benchmarks.giant.measure import ALONE, SPREAD, Line, mib, ranks, sent_by_ranks

RANKS = (4, 8)
SAMPLE = 8  # batches


def lines(counts: Iterable[int] = RANKS, make: Any = LARGE_BAGS) -> list[str]:
    """A table: of each number of ranks how many rows of a table are hot, and what the busiest rank sends in a step."""
    found = ["| ranks | hot rows of a table | busiest rank sends, MiB | with hot rows, MiB |", "|---|---|---|---|"]
    plain = make(ALONE, tf.float32)
    for count in counts:
        hot = len(wh.layers.hot_ids((plain.batch(i)[0].numpy() for i in range(SAMPLE)), count))
        sent = [mib(max(sent_in_a_step(partial(make, hot=h), count))) for h in (0, hot)]
        found.append(f"| {count} | {hot} | {sent[0]} | {sent[1]} |")
    return found


def sent_in_a_step(make: Any, count: int) -> list[int]:
    """Bytes that each rank sends in the second step; the first compiles."""
    with ranks(Line("hot", make, 0, count)):
        model = make(SPREAD, tf.float32)
        step = wh.function(model.step)
        step(*model.batch(0))
        before = sent_by_ranks()
        step(*model.batch(1))
        return [after - b for after, b in zip(sent_by_ranks(), before)]
