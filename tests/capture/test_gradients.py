"""Gradient nodes carry the scope of the op that they differentiate."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import backprop, record
from tensorflow.python.ops import gradients_util

from whale.capture.attrs import SCOPE_ATTR
from whale.capture.function import capture_function
from whale.capture.gradients import scope_gradients
from whale.capture.v1 import capture_graph
from whale.ir.program import Node


def _scope(name: str):
    value = tf.compat.v1.AttrValue(s=name.encode())
    return tf.compat.v1.get_default_graph()._attr_scope({SCOPE_ATTR: value})


def _forward(x: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    with _scope("first"):
        hidden = tf.tanh(tf.matmul(x, a))
    with _scope("second"):
        return tf.reduce_mean(tf.nn.elu(tf.matmul(hidden, b)))


def _check(nodes: tuple[Node, ...]) -> None:
    by_op: dict[str, set[str]] = {}
    for node in nodes:
        by_op.setdefault(node.op, set()).add(node.scope)
    assert by_op["TanhGrad"] == {"first"}
    assert by_op["EluGrad"] == {"second"}
    assert by_op["Tile"] == {"second"}
    assert by_op["MatMul"] == {"first", "second"}
    backward = [n for n in nodes if n.op == "MatMul" and n.attrs.get("transpose_a")]
    assert sorted(n.scope for n in backward) == ["first", "second"]


def test_tape() -> None:
    a, b = tf.Variable(np.ones((3, 4), np.float32)), tf.Variable(np.ones((4, 2), np.float32))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = _forward(x, a, b)
        return tape.gradient(loss, [a, b])

    captured = capture_function(step, [np.ones((5, 3), np.float32)])
    _check(captured.program.nodes)
    assert {v.name: v.scope for v in captured.program.variables} == {"Variable": "first", "Variable_1": "second"}


def test_tape_inside_a_loop() -> None:
    a = tf.Variable(np.ones((3, 3), np.float32))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for _ in tf.range(3):
                with _scope("turn"):
                    x = tf.tanh(tf.matmul(x, a))
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, a)

    program = capture_function(step, [np.ones((2, 3), np.float32)]).program
    inside = {n.op: n.scope for body in program.functions.values() for n in body.nodes}
    assert inside["Tanh"] == "turn"
    assert inside["TanhGrad"] == "turn"


@tf.custom_gradient
def _custom(x: tf.Tensor):
    return tf.math.erf(x), lambda slope: tf.math.atan(slope)


@pytest.mark.core
def test_custom_gradients_and_functions() -> None:
    a = tf.Variable(np.ones((3, 4), np.float32))
    inner = tf.function(tf.sinh)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with _scope("first"):
                h = _custom(tf.matmul(x, a))
            with _scope("second"):
                h = inner(h)
            with _scope("third"):
                loss = tf.reduce_mean(_custom(h))
        return tape.gradient(loss, a)

    nodes = capture_function(step, [np.ones((5, 3), np.float32)], mark_gradients=True).program.nodes
    assert [n.scope for n in nodes if n.op == "Atan"] == ["third", "first"]
    assert all(n.marks.backward for n in nodes if n.op == "Atan")
    calls = [n for n in nodes if n.op.endswith("PartitionedCall")]
    assert [n.scope for n in calls] == ["second", "second"]
    assert [bool(n.marks.backward) for n in calls] == [False, True]


def test_graph_gradients() -> None:
    with tf.Graph().as_default() as graph, scope_gradients():
        x = tf.compat.v1.placeholder(tf.float32, [5, 3], "x")
        a = tf.compat.v1.get_variable("a", [3, 4], use_resource=True)
        b = tf.compat.v1.get_variable("b", [4, 2], use_resource=True)
        gradients = tf.gradients(_forward(x, a, b), [a, b])
    _check(capture_graph(graph, gradients, {x: (5, 3)}).program.nodes)


def test_what_was_there_is_restored() -> None:
    before = backprop._gradient_function, gradients_util._MaybeCompile, record.record_operation
    with scope_gradients():
        outer = backprop._gradient_function
        with scope_gradients():
            assert backprop._gradient_function is not outer
        assert backprop._gradient_function is outer
    assert (backprop._gradient_function, gradients_util._MaybeCompile, record.record_operation) == before
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
    assert tape.gradient(y, x).numpy() == 6.0


def test_variables_of_custom_gradients_come_in_the_order_of_their_creation() -> None:
    """Traces alike in all processes: TensorFlow's set has them in the order of their addresses."""
    weights = [tf.Variable(np.full(3 + i, 0.1 * i)) for i in range(9)]

    @tf.custom_gradient
    def used(x: tf.Tensor) -> object:
        found = x + tf.add_n([tf.reduce_sum(w) for w in reversed(weights)])
        return found, lambda slope, variables: (slope, [tf.ones_like(w) * slope for w in variables])

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            found = used(x)
        return [found, *tape.gradient(found, weights)]

    program = capture_function(step, [np.ones(())]).program
    (node,) = (n for n in program.nodes if n.op == "IdentityN")
    assert [program.find_type(ref).shape for ref in node.inputs][2:] == [(3 + i,) for i in range(9)]
