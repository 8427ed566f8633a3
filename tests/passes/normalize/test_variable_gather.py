"""What is looked up in a variable's value is looked up in the variable, where nothing else needs all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from whale.capture.function import capture_function
from whale.ir.program import Node, Program, find_waited_for
from whale.passes.normalize.embedding.variable_gather import gather_from_variables
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline

IDS = tf.TensorSpec([8, 2], tf.int64)
Step = Callable[[tf.Variable, tf.Tensor], Any]


def captured(step: Step) -> Program:
    table = tf.Variable(tf.ones([6, 3]))
    return fold(inline(capture_function(lambda ids: step(table, ids), (IDS,), {}).program))


def value(table: tf.Variable) -> tf.Tensor:
    return tf.convert_to_tensor(table)


def nodes_of(program: Program, op: str) -> list[Node]:
    return [n for n in program.nodes if n.op == op]


def trained(look_up: Step) -> Step:
    def step(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(look_up(table, ids), tf.float32) ** 2)
        slope = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * slope.values, slope.indices))
        return loss

    return step


@pytest.mark.parametrize(
    ("look_up", "count"),
    [
        (lambda table, ids: tf.gather(value(table), ids), 1),
        (lambda table, ids: tf.gather(tf.identity(value(table)), ids % tf.shape(value(table), tf.int64)[0]), 1),
        (lambda table, ids: (lambda v: tf.gather(v, ids) + tf.gather(v, ids[:, ::-1]))(value(table)), 2),
        (lambda table, ids: tf.gather(value(table), ids) + tf.gather(value(table), ids[:, ::-1]), 2),
    ],
)
def test_lookups_in_a_value_read_the_variable(look_up: Step, count: int) -> None:
    program = gather_from_variables(captured(trained(look_up)))
    assert not nodes_of(program, "ReadVariableOp") and not nodes_of(program, "GatherV2")
    found = nodes_of(program, "ResourceGather")
    assert len(found) == count
    plain = nodes_of(captured(lambda table, ids: tf.gather(table, ids)), "ResourceGather")[0]
    assert all((n.attrs, n.outputs, n.stateful) == (plain.attrs, plain.outputs, plain.stateful) for n in found)
    (update,) = nodes_of(program, "ResourceScatterSub")
    assert {n.name for n in found} <= find_waited_for(program, [update.name])


def test_rows_are_cast_where_the_table_was() -> None:
    program = gather_from_variables(captured(trained(lambda table, ids: tf.gather(tf.cast(table, tf.bfloat16), ids))))
    (found,) = nodes_of(program, "ResourceGather")
    assert not nodes_of(program, "ReadVariableOp") and found.outputs[0].dtype == "float32"
    (cast,) = (node for node, _ in program.consumers[found.list_refs()[0]])
    assert cast.op == "Cast" and cast.outputs[0].dtype == "bfloat16" and cast.outputs[0].shape == (8, 2, 3)


def test_a_lookup_comes_before_what_changes_the_variable_after_the_reading() -> None:
    def step(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        table.assign_add(tf.ones([6, 3]))
        found = value(table)
        table.assign_sub(2 * tf.ones([6, 3]))
        return tf.gather(found, ids)

    program = gather_from_variables(captured(step))
    (first,), (last,) = nodes_of(program, "AssignAddVariableOp"), nodes_of(program, "AssignSubVariableOp")
    (found,) = nodes_of(program, "ResourceGather")
    assert found.controls == (first.name,) and found.name in last.controls
    names = [n.name for n in program.nodes]
    assert names.index(first.name) < names.index(found.name) < names.index(last.name)


def after_an_update(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    found = value(table)
    table.scatter_add(tf.IndexedSlices(tf.ones([8, 3]), ids[:, 0]))
    return tf.gather(found, tf.cast(tf.gather(table, ids)[..., 0], tf.int64))


def in_a_branch(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    return tf.cond(ids[0, 0] > 0, lambda: tf.gather(value(table), ids), lambda: tf.ones([8, 2, 3]))


@pytest.mark.parametrize(
    "step",
    [
        lambda table, ids: tf.gather(value(table), ids) @ tf.transpose(value(table)),
        lambda table, ids: (lambda v: tf.gather(v, ids) @ tf.transpose(v))(value(table)),
        lambda table, ids: (value(table), tf.gather(value(table), ids)),
        lambda table, ids: tf.gather(value(table), ids % 3, axis=1),
        lambda table, ids: tf.gather(value(table)[:2], ids[:2], batch_dims=1),
        after_an_update,
        in_a_branch,
    ],
    ids=["tied", "tied, read once", "returned", "columns", "batch", "after an update", "in a branch"],
)
def test_what_else_needs_all_of_a_variable_keeps_its_reading(step: Step) -> None:
    before = captured(step)
    assert gather_from_variables(before) is before
