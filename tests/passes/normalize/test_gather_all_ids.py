"""Lookups of each id once become lookups of every id, forward and backward, unless something needs the ids once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from whale.capture.function import capture_function
from whale.ir.program import Program
from whale.passes.normalize.embedding.gather_all_ids import gather_all_ids
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline


def scoped(program: Program, scope: str) -> Program:
    """``program`` with every node but its inputs in ``scope``."""
    nodes = tuple(n if n.name in program.inputs else replace(n, scope=scope) for n in program.nodes)
    return program.replace_nodes(nodes)


IDS = tf.TensorSpec([8], tf.int32)
SEGMENTS = np.repeat(np.arange(4), 2)


def found(loss: Callable[[tf.Variable, tf.Tensor], tf.Tensor], scope: str = "split_0") -> Program:
    table = tf.Variable(tf.ones([6, 3]))

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(table, ids)
        slope = tape.gradient(value, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * slope.values, slope.indices))
        return value

    program = fold(inline(capture_function(step, (IDS,), {}).program))
    return gather_all_ids(scoped(program, scope))


def ops_of(program: Program) -> set[str]:
    return {n.op for n in program.nodes}


def once(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    ids, back = tf.unique(ids)
    return tf.reduce_sum(tf.gather(tf.gather(table, ids), back) ** 2)


def bag(combiner: str) -> Callable[[tf.Variable, tf.Tensor], tf.Tensor]:
    def loss(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        at = np.stack([SEGMENTS, np.tile([0, 1], 4)], -1)
        sparse = tf.SparseTensor(at, ids, [4, 2])
        return tf.reduce_sum(tf.nn.embedding_lookup_sparse(table, sparse, None, combiner=combiner) ** 2)

    return loss


@pytest.mark.parametrize("loss", [once, bag("sum"), bag("mean"), bag("sqrtn")])
def test_no_tensor_has_a_size_that_only_the_run_knows(loss: Callable[..., tf.Tensor]) -> None:
    program = found(loss)
    assert "Unique" not in ops_of(program)
    assert all(t.is_static for n in program.nodes for t in n.outputs)
    read = next(n for n in program.nodes if n.op == "ResourceGather")
    assert read.inputs[1].node == "ids" and read.outputs[0].shape == (8, 3)
    (update,) = (n for n in program.nodes if n.op == "ResourceScatterSub")
    assert program.find_type(update.inputs[2]).shape == (8, 3)


def test_what_else_needs_the_ids_once_keeps_them() -> None:
    def loss(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        each, back = tf.unique(ids)
        rows = tf.gather(table, each)
        return tf.reduce_sum(tf.gather(rows, back) ** 2) + tf.reduce_sum(rows**2)  # each row once

    assert "Unique" in ops_of(found(loss))


def test_an_optimizer_takes_once_the_ids_that_were_looked_up() -> None:
    table, sums = tf.Variable(tf.ones([6, 3])), tf.Variable(tf.ones([6]))

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = once(table, ids)
        slope = tape.gradient(value, table)
        each, back = tf.unique(slope.indices)
        added = tf.math.unsorted_segment_sum(slope.values, back, tf.size(each))
        sums.scatter_add(tf.IndexedSlices(tf.reduce_sum(added**2, 1), each))
        return value

    before = scoped(fold(inline(capture_function(step, (IDS,), {}).program)), "split_0")
    program = gather_all_ids(before)
    (unique,) = (n for n in program.nodes if n.op == "Unique")
    assert unique.inputs[0].node == "ids" and unique.outputs[1].shape == (8,)
    read = next(n for n in program.nodes if n.op == "ResourceGather")
    assert read.outputs[0].shape == (8, 3)


def test_outside_of_split_scopes_nothing_changes() -> None:
    assert "Unique" in ops_of(found(once, "replica_0"))
