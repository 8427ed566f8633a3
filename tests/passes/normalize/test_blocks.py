"""Which indices are known to stay within blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from whale.capture.function import capture_function
from whale.passes.normalize.embedding.block_local_gather import mark_blocks
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline

FLOATS, NUMBERS = tf.TensorSpec([4, 6, 3]), tf.TensorSpec([4, 5], tf.int32)


def blocks(function: Callable[..., tf.Tensor]) -> dict[str, int]:
    """Marked nodes of a function of a table and indices: op type -> blocks."""
    program = mark_blocks(fold(inline(capture_function(function, (FLOATS, NUMBERS), {}).program)))
    return {n.op: n.marks.blocks for n in program.nodes if n.marks.blocks}


def rows(count: int = 4) -> tf.Tensor:
    return tf.broadcast_to(tf.range(count)[:, None], [4, 5])


def test_a_column_that_counts() -> None:
    assert blocks(lambda x, i: tf.gather_nd(x, tf.stack([rows(), i], -1))) == {"GatherNd": 4}
    assert blocks(lambda x, i: tf.scatter_nd(tf.stack([rows(), i], -1), x[:, :5], [4, 8, 3])) == {"ScatterNd": 4}
    joined = lambda x, i: tf.gather_nd(x, tf.concat([rows()[..., None], i[..., None]], -1))  # noqa: E731
    assert blocks(joined) == {"GatherNd": 4}


def test_the_gradient_of_a_gather_in_blocks() -> None:
    def slope(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        return tf.gradients(tf.reduce_sum(tf.gather(x, i, batch_dims=1) ** 2), x)[0]

    assert blocks(slope) == {"UnsortedSegmentSum": 4}


def test_the_gradient_of_top_k() -> None:
    def slope(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        return tf.gradients(tf.reduce_sum(tf.math.top_k(x, 2).values ** 2), x)[0]

    assert blocks(slope) == {"ScatterNd": 24}


def test_counts_that_are_too_large_to_be_folded() -> None:
    def long(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        count = tf.broadcast_to(tf.range(5000)[:, None], [5000, 2])
        return tf.gather_nd(tf.zeros([5000, 6]), tf.stack([count, tf.repeat(i[:1, :2], 5000, 0)], -1))

    assert blocks(long) == {"GatherNd": 5000}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: tf.gather_nd(x, tf.stack([i, rows()], -1)),  # it is the second column that counts
        lambda x, i: tf.gather_nd(x, tf.stack([3 - rows(), i], -1)),  # backwards
        lambda x, i: tf.gather_nd(tf.concat([x, x], 0), tf.stack([rows(), i], -1)),  # more rows than are counted
        lambda x, i: tf.gather_nd(x, tf.stack([rows(), i], 1)[:, :, :2]),  # stacked along another dimension
        lambda x, i: tf.math.unsorted_segment_sum(  # nothing says that the numbers stay below 6
            tf.reshape(x[:, :5], [20, 3]), tf.reshape(i + tf.range(4)[:, None] * 6, [20]), 24
        ),
    ],
)
def test_what_is_not_known_is_not_marked(function: Callable[..., tf.Tensor]) -> None:
    assert blocks(function) == {}
