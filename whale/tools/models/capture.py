"""Builds the training step of a described model as a Program.

It is built in a TensorFlow 1 graph, whose variables take no memory before they are initialised, so the
size of the model does not matter; from there it is captured like any session's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale.capture.function import capture_function
from whale.capture.v1 import GraphCapture
from whale.ir.program import Program
from whale.tools.models import losses
from whale.tools.models.families import Description

_v1 = tf.compat.v1
RATE = 1e-3


def capture_program(d: Description, mark_gradients: bool = False) -> Program:
    """Returns the captured step; not normalised. Allocates no weights.

    With recompute it has the marks for ``PlanSettings.memory.recompute="marked"``; with ``mark_gradients`` gradients
    are marked without it.
    """
    with tf.Graph().as_default() as graph:
        batch = {name: _v1.placeholder(dtype, shape, name) for name, (shape, dtype) in losses.list_inputs(d).items()}
        made: dict[str, Any] = {}

        def make_placeholder(name: str, shape: Sequence[int], dtype: str) -> Any:
            initial = _v1.zeros_initializer()
            return _v1.get_variable(name, shape, tf.as_dtype(dtype), initial, use_resource=True, trainable=False)

        loss, updates = _build_step(d, batch, made, make_placeholder)
        capture = GraphCapture(graph, mark_gradients=mark_gradients or d.recompute != "none")
        captured = capture.capture([loss, *updates], {t: tuple(t.shape.as_list()) for t in batch.values()})
    return captured.program


def make_step(d: Description) -> Callable[..., tf.Tensor]:
    """Returns the same step as a user's function of the batch's tensors, with allocated weights, for small
    descriptions.
    """
    made: dict[str, Any] = {}

    def variable(name: str, shape: Sequence[int], dtype: str) -> Any:
        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

    def step(*tensors: tf.Tensor) -> tf.Tensor:
        loss, _ = _build_step(d, dict(zip(losses.list_inputs(d), tensors)), made, variable)
        return loss

    return step


def trace_program(d: Description) -> Program:
    """Returns the program of `make_step`, captured as a user's function is."""
    specs = [tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in losses.list_inputs(d).items()]
    return capture_function(make_step(d), specs, {}, mark_gradients=d.recompute != "none").program


def _build_step(
    d: Description, batch: losses.Batch, made: dict[str, Any], variable: Callable[[str, Sequence[int], str], Any]
) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Builds (loss, updates): forward, backward, and an update of each weight."""
    values: dict[str, tf.Tensor] = {}

    def make_held(name: str, shape: Sequence[int]) -> Any:
        if name not in made:
            made[name] = variable(name, shape, d.dtype)
        return made[name]

    def make_weight(name: str, shape: Sequence[int]) -> tf.Tensor:
        if name not in values:
            values[name] = make_held(name, shape).read_value()
        return values[name]

    loss = losses.compute_loss(d, make_weight, batch)
    gradients = tf.gradients(loss, list(values.values()))
    updates = []
    rate = tf.constant(RATE, d.dtype)
    for (name, value), gradient in zip(values.items(), gradients):
        shape = value.shape.as_list()
        weights = make_held(name, shape)
        if d.optimizer == "sgd" and isinstance(gradient, tf.IndexedSlices):  # rows of a table
            ids, step = gradient.indices, rate * gradient.values
            updates.append(tf.raw_ops.ResourceScatterSub(resource=weights.handle, indices=ids, updates=step))
            continue
        gradient = tf.convert_to_tensor(gradient)
        if d.optimizer == "sgd":
            done = tf.raw_ops.ResourceApplyGradientDescent(var=weights.handle, alpha=rate, delta=gradient)
        else:
            some, most, small = (tf.constant(x, d.dtype) for x in (0.9, 0.999, 1e-7))
            done = tf.raw_ops.ResourceApplyAdam(
                var=weights.handle, m=make_held(f"{name}/m", shape).handle, v=make_held(f"{name}/v", shape).handle,
                beta1_power=some, beta2_power=most, lr=rate, beta1=some, beta2=most, epsilon=small, grad=gradient,
            )  # fmt: skip
        updates.append(done)
    return loss, updates
