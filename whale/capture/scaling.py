"""Losses are scaled before they are differentiated, and gradients unscaled, while a step is traced.

Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. Gradients are linear in what a tape or
tf.gradients begins with: times the scale there and divided by it at the end, every program computes what it did, and
what lies in between is large enough for float16. What is unscaled carries a mark (`UNSCALED`), by which
whale.passes.normalise.loss_scaling finds the gradients; so does the place of the answer whether all are finite
(`ALL_FINITE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import gradients_util

from whale.ir.program import ALL_FINITE, UNSCALED

LARGEST = 2.0**127  # twice as much is no float32


@dataclass
class LossScale:
    """The scale of a run's losses, as Keras's LossScaleOptimizer adapts it.

    Attributes:
      growth_steps: so many steps in a row without overflow double the scale; one with overflow halves it.
      scale, good_steps: variables: float32, and the number of steps without overflow since either happened.
    """

    initial: float
    growth_steps: int
    scale: tf.Variable = field(init=False)
    good_steps: tf.Variable = field(init=False)

    def __post_init__(self) -> None:
        with tf.init_scope():
            self.scale = tf.Variable(self.initial, dtype=tf.float32, trainable=False, name="whale_loss_scale")
            self.good_steps = tf.Variable(0, dtype=tf.int32, trainable=False, name="whale_good_steps")

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Adds the update to the graph that is being traced, if that computes gradients.

        The pass puts its answer in the place of ALL_FINITE.
        """
        if not any(UNSCALED in op.node_def.attr for op in tf.compat.v1.get_default_graph().get_operations()):
            return
        scale = self.scale.read_value()
        with _marked(ALL_FINITE):
            finite = tf.math.is_finite(scale)
        is_last = self.good_steps + 1 >= self.growth_steps
        grown = tf.where(is_last, tf.minimum(scale * 2.0, LARGEST), scale)
        counted = tf.where(is_last, 0, self.good_steps + 1)
        self.good_steps.assign(tf.where(finite, counted, 0))
        self.scale.assign(tf.where(finite, grown, scale * 0.5))


@contextmanager
def scaled_losses(by: LossScale) -> Iterator[None]:
    """While active, gradients are computed of scaled losses. Not to be nested."""
    of_tape, of_graph = tf.GradientTape.gradient, gradients_util._GradientsHelper

    @tf.autograph.experimental.do_not_convert
    def tape(self: Any, target: Any, sources: Any, output_gradients: Any = None, *rest: Any, **named: Any) -> Any:
        targets = tf.nest.flatten(target)
        given = tf.nest.flatten(output_gradients) if output_gradients is not None else [None] * len(targets)
        seeds = [_seed(t, g, by) for t, g in zip(targets, given)]
        found = of_tape(self, targets, sources, seeds, *rest, **named)
        return tf.nest.map_structure(lambda g: _unscaled(g, by), found)

    @tf.autograph.experimental.do_not_convert
    def graph(ys: Any, xs: Any, grad_ys: Any = None, *rest: Any, **named: Any) -> Any:
        targets = ys if isinstance(ys, (list, tuple)) else [ys]
        given = grad_ys if isinstance(grad_ys, (list, tuple)) else [grad_ys] * len(targets)
        seeds = [_seed(t, g, by) for t, g in zip(targets, given)]
        return [_unscaled(g, by) for g in of_graph(targets, xs, seeds, *rest, **named)]

    tf.GradientTape.gradient, gradients_util._GradientsHelper = tape, graph
    try:
        yield
    finally:
        tf.GradientTape.gradient, gradients_util._GradientsHelper = of_tape, of_graph


def _seed(target: Any, given: Any, by: LossScale) -> Any:
    if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
        return given
    scale = tf.cast(by.scale.read_value(), target.dtype)
    return tf.fill(tf.shape(target), scale) if given is None else tf.cast(given, target.dtype) * scale


def _unscaled(gradient: Any, by: LossScale) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_unscaled(gradient.values, by), gradient.indices, gradient.dense_shape)
    if not isinstance(gradient, tf.Tensor):
        return gradient
    inverse = tf.cast(1.0 / by.scale.read_value(), gradient.dtype)
    with _marked(UNSCALED):
        return gradient * inverse


def _marked(name: str) -> Any:
    return tf.compat.v1.get_default_graph()._attr_scope({name: attr_value_pb2.AttrValue(b=True)})
