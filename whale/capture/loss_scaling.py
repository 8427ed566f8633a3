"""Scales losses before they are differentiated, and unscales gradients, while a step is traced.

Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. Gradients are linear in what a tape or
tf.gradients begins with: times the scale there and divided by it at the end, every program computes what it did, and
what lies in between is large enough for float16. What is unscaled carries a mark (`UNSCALED`), by which
whale.passes.normalize.loss_scaling finds the gradients; so does the place of the answer whether all are finite
(`ALL_FINITE`).

A graph of version 1 holds no variable for it, which scripts would have to initialise and to restore: the scale is an
operand that a session feeds, and 1 where nothing is fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gradients_util

from whale.capture.attrs import ALL_FINITE, LOSS_SCALE, UNSCALED, mark_attributes

LARGEST = 2.0**127  # twice as much is no float32
_SCALE, _FINITE = "whale_loss_scale", "_found_finite"  # the operand's name, and how that of the answer goes on


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

    def read(self) -> tf.Tensor:
        """Reads the scale as an operand."""
        return self.scale.read_value()

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Adds the update of the loss scale to the graph being traced, if that computes gradients.

        The pass ``loss_scaling`` replaces the placeholder ALL_FINITE by the flag whether all gradients are finite.
        """
        if not any(UNSCALED in op.node_def.attr for op in tf.compat.v1.get_default_graph().get_operations()):
            return
        scale = self.scale.read_value()
        with _mark_inside(ALL_FINITE):
            finite = tf.math.is_finite(scale)
        is_last = self.good_steps + 1 >= self.growth_steps
        grown = tf.where(is_last, tf.minimum(scale * 2.0, LARGEST), scale)
        counted = tf.where(is_last, 0, self.good_steps + 1)
        self.good_steps.assign(tf.where(finite, counted, 0))
        self.scale.assign(tf.where(finite, grown, scale * 0.5))


@dataclass
class LossScaleFeed:
    """The loss scale of version 1 graphs: plain numbers, which every rank keeps alike since all get the same answers.

    Attributes:
      scale, good_steps: as those of ``LossScale``.
    """

    scale: float
    growth_steps: int
    good_steps: int = 0

    def read(self) -> tf.Tensor:
        """Returns the placeholder of the scale, made on first use in the outermost graph that is being built."""
        with tf.init_scope(), tf.compat.v1.name_scope(""):
            graph = tf.compat.v1.get_default_graph()
            try:
                return graph.get_tensor_by_name(f"{_SCALE}:0")
            except KeyError:
                with _mark_inside(LOSS_SCALE):
                    scale = tf.compat.v1.placeholder_with_default(np.float32(1), (), _SCALE)
                with _mark_inside(ALL_FINITE):
                    finite = tf.math.is_finite(scale, f"{_SCALE}_is_kept")
                tf.identity(finite, f"{_SCALE}{_FINITE}")
                return scale

    @staticmethod
    def answer(scale: tf.Operation) -> tf.Tensor:
        """Returns the tensor that tells whether all gradients are finite, in the graph that holds the operand
        ``scale``.
        """
        return scale.graph.get_tensor_by_name(f"{scale.name}{_FINITE}:0")

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step whose gradients were all finite, or were not."""
        is_last = self.good_steps + 1 >= self.growth_steps
        self.good_steps = self.good_steps + 1 if finite and not is_last else 0
        if not finite:
            self.scale *= 0.5
        elif is_last:
            self.scale = min(self.scale * 2.0, LARGEST)


Gradients = Callable[..., Any]


@contextmanager
def scale_losses(by: LossScale) -> Iterator[None]:
    """Computes gradients from scaled losses while active; not to be nested."""
    of_tape, of_graph = tf.GradientTape.gradient, gradients_util._GradientsHelper

    @tf.autograph.experimental.do_not_convert
    def scale_tape_gradient(self: Any, *args: Any, **named: Any) -> Any:
        return compute_scaled_tape_gradient(by, of_tape, self, *args, **named)

    @tf.autograph.experimental.do_not_convert
    def scale_graph_gradients(*args: Any, **named: Any) -> Any:
        return compute_scaled_gradients(by, of_graph, *args, **named)

    tf.GradientTape.gradient, gradients_util._GradientsHelper = scale_tape_gradient, scale_graph_gradients
    try:
        yield
    finally:
        tf.GradientTape.gradient, gradients_util._GradientsHelper = of_tape, of_graph


def compute_scaled_tape_gradient(
    by: LossScale | LossScaleFeed,
    gradient: Gradients,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """Calls ``gradient``, which is ``GradientTape.gradient``, with scaled losses and unscales its results."""
    targets = tf.nest.flatten(target)
    given = tf.nest.flatten(output_gradients) if output_gradients is not None else [None] * len(targets)
    seeds = [_scale_seed(t, g, by) for t, g in zip(targets, given)]
    return tf.nest.map_structure(lambda g: _unscale(g, by), gradient(tape, targets, sources, seeds, *rest, **named))


def compute_scaled_gradients(
    by: LossScale | LossScaleFeed, gradient: Gradients, ys: Any, xs: Any, grad_ys: Any = None, *rest: Any, **named: Any
) -> Any:
    """Calls ``gradient``, which is ``tf.gradients``, with scaled losses and unscales its results."""
    targets = ys if isinstance(ys, (list, tuple)) else [ys]
    given = grad_ys if isinstance(grad_ys, (list, tuple)) else [grad_ys] * len(targets)
    seeds = [_scale_seed(t, g, by) for t, g in zip(targets, given)]
    return [_unscale(g, by) for g in gradient(targets, xs, seeds, *rest, **named)]


def _scale_seed(target: Any, given: Any, by: LossScale | LossScaleFeed) -> Any:
    if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
        return given
    scale = tf.cast(by.read(), target.dtype)
    return tf.fill(tf.shape(target), scale) if given is None else tf.cast(given, target.dtype) * scale


def _unscale(gradient: Any, by: LossScale | LossScaleFeed) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_unscale(gradient.values, by), gradient.indices, gradient.dense_shape)
    if not isinstance(gradient, tf.Tensor):
        return gradient
    inverse = tf.cast(1.0 / by.read(), gradient.dtype)
    with _mark_inside(UNSCALED):
        return gradient * inverse


def _mark_inside(name: str) -> Any:
    return tf.compat.v1.get_default_graph()._attr_scope(mark_attributes(name))
