"""Eager operations that are given a variable read its value, wherever that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

VALUE = np.arange(24.0).reshape(6, 4)
# TensorFlow reads operands of all but the last two in C++, from behind the variable's handle.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sum": tf.reduce_sum,
    "relu": lambda w: tf.nn.relu(w - 5.0),
    "raw": lambda w: tf.raw_ops.Neg(x=w),
    "square": tf.square,
    "matmul": lambda w: tf.matmul(w, w, transpose_a=True),
    "two": lambda w: tf.raw_ops.Pack(values=[w, w]),
    "gather": lambda w: tf.gather(w, [1, 3]),
    "add": lambda w: w + 1.0,
    "numpy": lambda w: np.asarray(w),
}


def trained(config: dict[str, Any], ranks: Callable[..., None], scope: Callable[[], Any] | None = None) -> tf.Variable:
    """Returns a variable that a step of two ranks has updated: by 1 in all elements."""
    ranks(2, **config)
    first = tf.Variable(np.ones((6, 6)))

    def loss_of(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        if scope is None:
            return tf.reduce_sum(x @ first @ w)
        with wh.stage():
            hidden = x @ first
        with wh.stage():
            return tf.reduce_sum(hidden @ w)

    w = tf.Variable(VALUE)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        gradients = tape.gradient(loss, [first, w])
        first.assign_sub(0.0 * gradients[0])
        w.assign_add(tf.ones_like(w) + 0.0 * gradients[1])
        return loss

    step(tf.ones((4, 6), tf.float64))
    return w


# How a script changes a part of a variable: by a method, by a function of TensorFlow 1, by the handle.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "row": lambda w: w[1].assign(tf.ones(4, tf.float64)),
    "rows": lambda w: w[2:4].assign(2.0 * w[2:4]),
    "element": lambda w: w[5, 2].assign(-1.0),
    "columns": lambda w: w[:, 1:3].assign(tf.zeros((6, 2), tf.float64)),
    "scattered": lambda w: tf.compat.v1.scatter_update(w, [3, 0], tf.ones((2, 4), tf.float64)),
    "scattered elements": lambda w: tf.compat.v1.scatter_nd_add(w, [[4, 1]], [5.0]),
    "counted": lambda w: tf.raw_ops.AssignSubVariableOp(resource=w.handle, value=tf.ones((6, 4), tf.float64)),
    "descended": lambda w: tf.raw_ops.ResourceApplyGradientDescent(
        var=w.handle, alpha=tf.constant(0.5, tf.float64), delta=tf.ones((6, 4), tf.float64)
    ),
    "read": lambda w: tf.raw_ops.ReadVariableOp(resource=w.handle, dtype=tf.float64),
    "gathered": lambda w: tf.raw_ops.ResourceGather(resource=w.handle, indices=[1, 5], dtype=tf.float64),
}
PLACES = {
    "zero 3": {"memory.zero": 3, "memory.zero_min_bytes": 0},
    "whole": {},
}


@pytest.mark.parametrize("place", [*PLACES, "stages"])
def test_the_value_is_read_and_not_what_lies_behind_the_handle(place: str, ranks: Callable[..., None]) -> None:
    w = trained(PLACES.get(place, {}), ranks, wh.stage if place == "stages" else None)
    for name, operation in OPERATIONS.items():
        np.testing.assert_array_equal(operation(w), operation(tf.constant(VALUE + 1)), name)


@pytest.mark.parametrize("place", [*PLACES, "stages", "deferred"])
def test_parts_of_the_value_are_changed(place: str, ranks: Callable[..., None]) -> None:
    if place == "deferred":  # no step has had it
        ranks(2, **PLACES["zero 3"])
        made = [tf.Variable(lambda: tf.constant(VALUE + 1.0)) for _ in CHANGES]
    else:
        made = [trained(PLACES.get(place, {}), ranks, wh.stage if place == "stages" else None)]
    seen = wh.function(lambda x, w: tf.reduce_sum(x @ w, 0))
    alone = tf.Variable(VALUE + 1.0)
    for i, (name, change) in enumerate(CHANGES.items()):
        w = made[i % len(made)]
        if place == "deferred":
            alone = tf.Variable(VALUE + 1.0)
        found, expected = change(w), change(alone)
        if name in ("read", "gathered"):
            np.testing.assert_array_equal(found, expected, name)
        np.testing.assert_array_equal(w.numpy(), alone.numpy(), name)
        np.testing.assert_allclose(seen(tf.ones((4, 6), tf.float64), w), 4.0 * tf.reduce_sum(alone, 0), err_msg=name)


@pytest.mark.parametrize("name", ["sum", "square", "add"])
def test_a_tape_differentiates_what_is_read(name: str, ranks: Callable[..., None]) -> None:
    w = trained(PLACES["zero 3"], ranks)
    found = []
    for operand in (w, tf.Variable(VALUE + 1)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(OPERATIONS[name](operand) ** 2)
        found.append(tape.gradient(loss, operand))
    np.testing.assert_array_equal(found[0], found[1])


def test_a_variable_of_which_no_step_knows_yet_is_made_whole(ranks: Callable[..., None]) -> None:
    ranks(2, **PLACES["zero 3"])
    w = tf.Variable(lambda: tf.constant(VALUE))
    np.testing.assert_array_equal(tf.reduce_sum(w), VALUE.sum())


def test_steps_go_on_from_the_value_that_was_read(ranks: Callable[..., None]) -> None:
    ranks(2, **PLACES["zero 3"])
    w = tf.Variable(VALUE)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w))
        w.assign_sub(0.01 * tape.gradient(loss, w))
        return loss

    x = np.linspace(-1.0, 1.0, 24).reshape(4, 6)
    alone = VALUE.copy()
    for _ in range(3):
        step(tf.constant(x))
        alone -= 0.01 * x.T @ (2 * (x @ alone)) / 16
        np.testing.assert_allclose(tf.reduce_sum(w), alone.sum(), rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), alone, rtol=1e-12)


@pytest.mark.core
def test_after_a_run_of_one_process_they_are_ordinary_again(ranks: Callable[..., None]) -> None:
    w, total = tf.Variable(VALUE), tf.function(lambda w: tf.reduce_sum(w))

    def train(function: Callable[..., Any]) -> tf.Tensor:
        return function(lambda x: w.assign_add(0.1 * tf.transpose(x) @ tf.tanh(x @ w)))(tf.ones((4, 6), tf.float64))

    alone = tf.Variable(VALUE)
    for config in (PLACES["zero 3"], PLACES["whole"], PLACES["zero 3"]):
        ranks(2, **config)
        train(wh.function)
        alone.assign_add(0.1 * tf.ones((6, 4), tf.float64) * tf.tanh(tf.ones((4, 6), tf.float64) @ alone)[0] * 4.0)
        wh.shutdown()
        assert type(w) is type(alone)
        np.testing.assert_allclose(w.numpy(), alone.numpy(), rtol=1e-12)
        np.testing.assert_allclose(total(w), tf.reduce_sum(alone), rtol=1e-12)
        train(tf.function)
        alone.assign_add(0.1 * tf.ones((6, 4), tf.float64) * tf.tanh(tf.ones((4, 6), tf.float64) @ alone)[0] * 4.0)
