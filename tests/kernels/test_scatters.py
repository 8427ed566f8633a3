"""Sums of rows into tables: which are one operation, and that tables are what TensorFlow's kernels make of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
import whale_ops
from tests.kernels.one_rank import on_one_rank, without
from tests.programs import Builder
from whale.ir.ops import SCATTER_ROWS
from whale.kernels.updates import fuse_scatters, list_scatters

pytestmark = pytest.mark.core


def _tables(dtype: str) -> list[tf.Variable]:
    draw = np.random.default_rng(0)
    return [tf.Variable(draw.normal(size=(9, *row)), dtype=dtype) for row in ((4,), (), (3, 5))]


def _step(tables: list[tf.Variable], index: str) -> Any:
    """Rows by ids that repeat, added to two tables and subtracted from one, which is changed twice and read between."""
    ids = tf.constant([3, 0, 3, 8, 3, 0, 7, 1, 2, 3, 4, 5, 6, 7, 8, 0], index)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        for number, table in enumerate(tables):
            rows = tf.reshape(tf.range(16 * table[0].shape.num_elements()), [16, *table.shape[1:]])
            slices = tf.IndexedSlices(tf.cast(rows, x.dtype) * x[number], ids)
            table.scatter_sub(slices) if number == 1 else table.scatter_add(slices)
        between = tables[2] * 2
        tables[2].scatter_add(tf.IndexedSlices(tf.ones([2, 3, 5], x.dtype), tf.constant([[1], [2]][:2], index)[:, 0]))
        return [*map(tf.identity, tables), between]

    return step


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_tables_are_those_of_tensorflow(dtype: str, index: str) -> None:
    x = tf.constant([0.3, -1.7, 2.1], dtype)
    expected = [value.numpy() for value in tf.function(_step(_tables(dtype), index))(x)]
    found, ops = on_one_rank(_step(_tables(dtype), index), x)
    for ours, theirs in zip(found, expected):
        np.testing.assert_array_equal(ours, theirs)
    assert ops[SCATTER_ROWS] == 3 and not any(op.startswith("ResourceScatter") for op in ops)
    _, ops = on_one_rank(_step(_tables(dtype), index), x, **without("updates"))
    assert ops[SCATTER_ROWS] == 0


def test_values_that_were_read_before_stay() -> None:
    table = tf.Variable(tf.zeros([4, 2]))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        before = table.read_value()
        with tf.control_dependencies([before]):
            table.scatter_add(tf.IndexedSlices(x, [1, 3]))
        return [before + 0, table.read_value()]

    (before, after), _ = on_one_rank(step, tf.ones([2, 2]))
    assert not before.any() and after.sum() == 4


def test_which_are_one_operation() -> None:
    b = Builder("scatters", "float32")
    x, ids = b.input("x", (3, 4)), b.const([0, 1, 2], "int32")
    kinds = {"dtype": b.types[x].dtype, "Tindices": "int32"}
    tables = [b.variable(f"table_{i}", (5, 4)) for i in range(3)]

    def add(number: int, op: str = "ResourceScatterAdd", controls: tuple[str, ...] = ()) -> str:
        return b.node(op, (tables[number], ids, x), (), f"{op}_{len(b.nodes)}", controls, stateful=True, **kinds).node

    first = add(0)
    names = [first, add(1), add(1), add(2, "ResourceScatterSub"), add(2, controls=(first,))]
    program = b.build([], names)
    groups = [replaced for _, replaced in list_scatters(program)]
    assert groups == [[names[0], names[1]], [names[2]], [names[3]], [names[4]]]
    fused = fuse_scatters(program)
    assert Counter(n.op for n in fused.nodes)[SCATTER_ROWS] == 4 and len(fused.effects) == 4
    assert {n.name for n in fused.nodes if n.controls} == {f"{names[4]}/{SCATTER_ROWS}"}


@pytest.mark.parametrize(
    ("ids", "rows", "why"),
    [
        ([0, 4], (2, 3), r"indices\[1\] = 4 is not in \[0, 4\)"),
        ([-1], (1, 3), r"indices\[0\] = -1"),
        ([0], (1, 2), "expected"),
    ],
)
def test_what_does_not_fit_changes_nothing(ids: list[int], rows: tuple[int, ...], why: str) -> None:
    ops = whale_ops.load_ops()
    tables = [tf.Variable(tf.zeros([4, 3])) for _ in range(2)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        ops.whale_scatter_rows(
            [t.handle for t in tables], [[1], ids], [tf.ones([1, 3]), tf.ones(rows)], subtracts=False
        )
    assert not any(t.numpy().any() for t in tables)
    wh.shutdown()
