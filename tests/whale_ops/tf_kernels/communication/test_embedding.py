"""Rows of tables that ranks hold in parts: what comes back is what was asked for, what goes there is added up."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import whale_ops
from tests.whale_ops.harness import ranks

pytestmark = pytest.mark.core
STARTS = [[0, 4, 4, 9], [0, 1, 3, 5]]  # of two tables of 9 and 5 rows; the second rank has nothing of the first
IDS = [
    [[[7, 0], [7, 3]], [4, 4, 4]],
    [[[8, 8], [8, 8]], [0, 2, 1]],
    [np.zeros([0, 2]), [3]],
]  # of each rank and table


@pytest.mark.parametrize("dtype, ids_dtype", [(tf.float64, tf.int32), (tf.float32, tf.int64)])
def test_rows_and_sums_of_two_tables(dtype: tf.DType, ids_dtype: tf.DType) -> None:
    ops = whale_ops.load_ops()
    tables = [np.arange(27.0).reshape(9, 3), np.arange(10.0).reshape(5, 2, 1)]
    ids = [[np.array(x, ids_dtype.as_numpy_dtype) for x in of] for of in IDS]
    slopes = [[np.random.default_rng(r).standard_normal((*x.shape, *t.shape[1:])) for x, t in zip(of, tables)]
              for r, of in enumerate(ids)]  # fmt: skip

    @tf.function
    def step() -> list[list[tf.Tensor]]:
        found = []
        for r, comm in enumerate(communicators):
            h = ops.whale_communicator(communicator=comm.name, rank=comm.rank)
            asked, back, sent, came = ops.whale_route_ids(h, ids[r], key="ids", starts=[*STARTS[0], *STARTS[1]])
            parts = [tf.constant(t[s[r] : s[r + 1]], dtype) for t, s in zip(tables, STARTS)]
            rows = [tf.gather(part, at) for part, at in zip(parts, asked)]
            read = ops.whale_return_rows(h, rows, back, sent, came, key="rows")
            sums = ops.whale_send_rows(h, [tf.constant(s, dtype) for s in slopes[r]], back, sent, came, key="sums")
            added = [tf.tensor_scatter_nd_add(p, at[:, None], s) for p, at, s in zip(parts, asked, sums)]
            found.append([*read, *added])
        return found

    with ranks(3) as communicators:
        for _ in range(2):
            results = tf.nest.map_structure(lambda t: t.numpy(), step())
        moved = sum(c.logical_bytes for comm in communicators for c in comm.counters() if c.key.endswith("ids")) // 2
    for r in range(3):
        for k, table in enumerate(tables):
            np.testing.assert_array_equal(results[r][k], table[ids[r][k].astype(int)])
    for k, table in enumerate(tables):
        expected = table.copy()
        for r in range(3):
            np.add.at(expected, ids[r][k].astype(int), slopes[r][k])
        np.testing.assert_allclose(np.concatenate([results[r][2 + k] for r in range(3)]), expected, rtol=1e-5)
    # Each id once: 7 of the first table and 4 of the second; 8, and 0; nothing, for 3 is its own.
    assert moved == ids_dtype.size * (2 + 2 + 0)


def test_ids_that_are_none() -> None:
    ops = whale_ops.load_ops()
    with (
        ranks(1) as (comm,),
        pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[1\] = 9 is not in \[0, 9\)"),
    ):
        h = ops.whale_communicator(communicator=comm.name, rank=0)
        ops.whale_route_ids(h, [tf.constant([3, 9])], key="ids", starts=[0, 9])
