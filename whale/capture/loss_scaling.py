"""Scales losses before they are differentiated, and unscales the gradients, while a step is traced.

Gradients are linear in the seed with which a tape or tf.gradients starts. With the seed multiplied by the loss scale,
and the gradients divided by it, the result is the same, but intermediate values are large enough for float16. Source:
Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.

The nodes that output unscaled gradients are given the attribute `UNSCALED` (see whale.capture.attrs), by which the pass
whale.passes.normalize.loss_scaling finds them. The node that stands for "all gradients are finite" is given the
attribute `ALL_FINITE`, until that pass replaces it.

In a step of ``wh.function`` the scale is a variable (``LossScale``). In a version 1 graph it is a placeholder that the
session feeds, 1 by default (``LossScaleFeed``), since scripts would have to initialise and restore a variable.
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

LARGEST = 2.0**127  # the largest power of two that a float32 holds
_SCALE, _FINITE = "whale_loss_scale", "_found_finite"  # name of the placeholder; what the fetched flag's name appends


@dataclass
class LossScale:
    """Holds the loss scale of a run in variables, and adapts it as Keras' LossScaleOptimizer does.

    Attributes:
      initial: the scale at the start.
      growth_steps: after this many steps in a row without overflow the scale doubles; a step with overflow halves it.
      scale: variable, float32 scalar.
      good_steps: variable, int32 scalar: steps without overflow since the scale last changed.
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
        """Returns the present scale as a float32 scalar."""
        return self.scale.read_value()

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Adds the update of the loss scale to the graph being traced, if this graph computes gradients.

        The update depends on whether all gradients are finite. Which gradients there are is not known yet, so
        ``is_finite(scale)`` with the attribute `ALL_FINITE` stands in, and the pass
        ``whale.passes.normalize.loss_scaling`` replaces it by the test of all gradients.
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
    """Holds the loss scale for version 1 graphs as plain numbers, and adapts it.

    Each rank has a copy. The copies stay equal, since all ranks learn the same about whether gradients were finite.

    Attributes:
      scale: the present scale.
      growth_steps: after this many steps in a row without overflow the scale doubles; a step with overflow halves it.
      good_steps: steps without overflow since the scale last changed.
    """

    scale: float
    growth_steps: int
    good_steps: int = 0

    def read(self) -> tf.Tensor:
        """Returns the placeholder of the scale; it is made at the first call, in the outermost graph that is being
        built.
        """
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
        """Returns the bool tensor that tells whether all gradients are finite; a session fetches it beside the user's
        fetches.

        Args:
          scale: the placeholder operation that ``read`` has made.
        """
        return scale.graph.get_tensor_by_name(f"{scale.name}{_FINITE}:0")

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step.

        Args:
          finite: whether all gradients of the step were finite.
        """
        is_last = self.good_steps + 1 >= self.growth_steps
        self.good_steps = self.good_steps + 1 if finite and not is_last else 0
        if not finite:
            self.scale *= 0.5
        elif is_last:
            self.scale = min(self.scale * 2.0, LARGEST)


Gradients = Callable[..., Any]


@contextmanager
def scale_losses(by: LossScale) -> Iterator[None]:
    """Patches GradientTape.gradient and tf.gradients to scale losses inside of the context; must not be nested."""
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
    """Calls ``GradientTape.gradient`` with scaled seeds, and unscales the gradients that it returns.

    Args:
      by: the loss scale.
      gradient: the original ``GradientTape.gradient``.
      tape, target, sources, output_gradients: its arguments.
    """
    targets = tf.nest.flatten(target)
    given = tf.nest.flatten(output_gradients) if output_gradients is not None else [None] * len(targets)
    seeds = [_scale_seed(t, g, by) for t, g in zip(targets, given)]
    return tf.nest.map_structure(lambda g: _unscale(g, by), gradient(tape, targets, sources, seeds, *rest, **named))


def compute_scaled_gradients(
    by: LossScale | LossScaleFeed, gradient: Gradients, ys: Any, xs: Any, grad_ys: Any = None, *rest: Any, **named: Any
) -> Any:
    """Calls ``tf.gradients`` with scaled seeds, and unscales the gradients that it returns.

    Args:
      by: the loss scale.
      gradient: the original function behind ``tf.gradients``.
      ys, xs, grad_ys: its arguments.
    """
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
