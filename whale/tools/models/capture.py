"""Builds the training step of a described model as a Program.

It is built in a TensorFlow 1 graph, whose variables take no memory before they are initialised, so the
size of the model does not matter; from there it is captured like any session's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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

        loss, updates = _build_step(d, batch, made, _Handle)
        capture = GraphCapture(graph, mark_gradients=mark_gradients or d.recompute != "none")
        captured = capture.capture([loss, *updates], {t: tuple(t.shape.as_list()) for t in batch.values()})
    return _mark_compiled(captured.program) if d.xla else captured.program


def _mark_compiled(program: Program) -> Program:
    """Marks all nodes as those of a function that XLA compiles."""
    nodes = tuple(replace(node, marks=node.marks.replace_marks(compiled=True)) for node in program.nodes)
    return replace(program, nodes=nodes, functions={n: _mark_compiled(p) for n, p in program.functions.items()})


class _Handle:
    """The handle of a variable without a first value: a `tf.Variable` takes several times as long to build."""

    def __init__(self, name: str, shape: Sequence[int], dtype: str) -> None:
        self.handle = tf.raw_ops.VarHandleOp(dtype=tf.as_dtype(dtype), shape=shape, shared_name=name, name=name)
        self._dtype, self._shape = tf.as_dtype(dtype), shape

    def read_value(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._dtype)
        value.set_shape(self._shape)
        return value


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

    return tf.function(step, jit_compile=True) if d.xla else step


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
    rate, some, most, small = (tf.constant(x, d.dtype) for x in (RATE, 0.9, 0.999, 1e-7))
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
            done = tf.raw_ops.ResourceApplyAdam(
                var=weights.handle, m=make_held(f"{name}/m", shape).handle, v=make_held(f"{name}/v", shape).handle,
                beta1_power=some, beta2_power=most, lr=rate, beta1=some, beta2=most, epsilon=small, grad=gradient,
            )  # fmt: skip
        updates.append(done)
    return loss, updates
