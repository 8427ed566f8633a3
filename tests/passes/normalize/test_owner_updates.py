"""Updates that visit each id once are marked where they do the same to each row, and stay as they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.passes.normalize.test_gather_all_ids import IDS, scoped
from whale.capture.function import capture_function
from whale.ir.program import Program
from whale.passes.normalize.embedding.owner_updates import update_on_owners
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline
from whale.sharding_rules.embedding import SUMS_BY_ID

Rows = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def updated(rows: Rows, scope: str = "split_0") -> Program:
    """A table whose rows become what ``rows`` makes of (its rows, sums of slopes, the ids once)."""
    table = tf.Variable(tf.ones([6, 3]))

    def step(ids: tf.Tensor, slopes: tf.Tensor) -> None:
        once, back = tf.unique(ids)
        sums = tf.math.unsorted_segment_sum(slopes, back, tf.size(once))
        new = rows(tf.gather(table, once), sums, once)
        table.scatter_update(tf.IndexedSlices(new, once))

    slopes = tf.TensorSpec([8, 3], tf.float32)
    program = fold(inline(capture_function(step, (IDS, slopes), {}).program))
    return update_on_owners(scoped(program, scope))


def by_row(read: tf.Tensor, sums: tf.Tensor, once: tf.Tensor) -> tf.Tensor:
    scale = tf.expand_dims(tf.sqrt(tf.reduce_mean(tf.square(sums), 1) + 1.0), -1)
    return read - 0.1 * sums / scale * tf.constant([[1.0, 2.0, 3.0]])


def test_what_does_the_same_to_each_row_is_marked() -> None:
    program = updated(by_row)
    (sums,) = (n for n in program.nodes if n.op == SUMS_BY_ID)
    assert not {"Unique", "UnsortedSegmentSum", "Size"} & {n.op for n in program.nodes}
    readers = {n.name for ref in sums.list_refs() for n, _ in program.consumers[ref]}
    marked = {n.name: n.op for n in program.nodes if n.marks.owned_rows}
    assert readers <= marked.keys()
    assert {"ResourceGather", "ResourceScatterUpdate", "ExpandDims"} <= set(marked.values())


@pytest.mark.parametrize(
    "rows",
    [
        lambda read, sums, once: read - tf.cumsum(sums),
        lambda read, sums, once: read - sums / tf.reduce_sum(sums),
        lambda read, sums, once: read - sums / tf.cast(tf.size(once), tf.float32),
        lambda read, sums, once: read - sums * tf.cast(once, tf.float32)[:, None],
        lambda read, sums, once: read - tf.reverse(sums, [0]),
    ],
    ids=["rows before", "all rows", "how many", "numbers of rows", "order"],
)
def test_what_looks_at_other_rows_is_left_alone(rows: Rows) -> None:
    program = updated(rows)
    assert not any(n.op == SUMS_BY_ID or n.marks.owned_rows for n in program.nodes)


def test_nothing_changes_outside_of_split_scopes() -> None:
    assert not any(n.op == SUMS_BY_ID for n in updated(by_row, "replica_0").nodes)
