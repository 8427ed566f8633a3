"""Names of nodes and of functions are those of every process, whatever a process did before it traced a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.lines import lines_of
from whale.capture.function import capture_function
from whale.capture.graph import Names
from whale.ir.fingerprint import compute_fingerprint, list_node_digests
from whale.ir.program import Program
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings

pytestmark = pytest.mark.core

ROWS = np.random.default_rng(0).random((8, 6), np.float32)
TABLE = tf.Variable(ROWS[:, :4], name="table")
WEIGHT = tf.Variable(ROWS[:6], name="weight")


def embedding(x: tf.Tensor) -> Any:
    ids = tf.cast(x, tf.int32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(TABLE, ids) ** 2)
    slope = tape.gradient(loss, TABLE)
    TABLE.scatter_sub(tf.IndexedSlices(slope.values, slope.indices))
    return loss


def loop(x: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        count = tf.constant(0)
        while count < 3 and tf.reduce_sum(x) < 1e6:
            if tf.reduce_sum(x) > 0:
                x = tf.matmul(x, WEIGHT) + tf.nn.embedding_lookup(WEIGHT, count)
            else:
                x = x * TABLE[0, 0]
            count += 1
        loss = tf.reduce_sum(x)
    return tape.gradient(loss, [WEIGHT, TABLE])


def nested(x: tf.Tensor) -> Any:
    inner = tf.function(lambda a: tf.reduce_sum(tf.nn.embedding_lookup(WEIGHT, [1, 2]) * a[:2]))
    again = tf.recompute_grad(lambda a: tf.tanh(tf.matmul(a, WEIGHT)))
    with tf.GradientTape() as tape:
        loss = inner(x) + tf.reduce_sum(again(x))
    return tape.gradient(loss, WEIGHT)


def python(x: tf.Tensor) -> Any:
    y = tf.numpy_function(np.negative, [x], tf.float32)
    return tf.reduce_sum(y) + tf.reduce_sum(tf.py_function(np.negative, [x], tf.float32))


def programs(step: Callable[..., Any]) -> list[Program]:
    """The step as captured before and after the process did something else."""
    found = []
    for _ in range(2):
        found.append(normalise(capture_function(step, [ROWS]).program, PlanSettings(size=2)))
        for _ in range(97):
            tf.constant(1.0) + 1.0  # each eager tensor draws a number
        tf.function(lambda x: tf.numpy_function(np.negative, [x], tf.float32))(1.0)
    return found


@pytest.mark.parametrize("step", [embedding, loop, nested, python])
def test_a_step_is_the_same_program_whatever_was_computed_before(step: Callable[..., Any]) -> None:
    first, second = programs(step)
    assert list_node_digests(first) == list_node_digests(second)
    assert compute_fingerprint(first) == compute_fingerprint(second)


def test_arguments_of_bodies_are_called_as_tensorflow_calls_them() -> None:
    program = programs(loop)[0]
    arguments = [name for body in program.functions.values() for name in body.inputs]
    assert any("loop_counter" in name for name in arguments)
    assert all(len(set(body.inputs)) == len(body.inputs) for body in program.functions.values())


def test_names_that_are_alike_are_numbered_in_constant_time() -> None:
    names = Names({"w_2"})
    assert [names.make_unused("w") for _ in range(4)] == ["w", "w_1", "w_3", "w_4"]
    assert names.make_unused("w_1") == "w_1_1"
    lines = [lines_of(lambda: [names.make_unused("b") for _ in range(100)]) for _ in range(3)]
    assert lines[2] <= 1.1 * lines[1]
