"""Takes gradients of version 1 graphs of scaled losses, while a run computes in float16."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from whale.capture.scaling import LossScaleFeed, compute_scaled_gradients, compute_scaled_tape_gradient
from whale.frontends.tf1.taking import find_spread_run, replace_method
from whale.runtime.run.loss_scale import find_loss_scale_feed


def patch_gradients() -> None:
    """Patches ``tf.gradients``, and a tape's, to scale losses and unscale gradients during such a run."""
    replace_method(tf.GradientTape, "gradient", _wrap_tape_gradient)
    replace_method(gradients_util, "_GradientsHelper", _wrap_graph_gradients)


def _find_scale() -> LossScaleFeed | None:
    context = find_spread_run()
    if context is None or context.own_programs is not None or ops.executing_eagerly_outside_functions():
        return None  # a step that is a function has a scale of its own: see whale.capture.function
    return find_loss_scale_feed(context)


def _wrap_tape_gradient(original: Any, *args: Any, **named: Any) -> Any:
    scale = _find_scale()
    return original(*args, **named) if scale is None else compute_scaled_tape_gradient(scale, original, *args, **named)


def _wrap_graph_gradients(original: Any, *args: Any, **named: Any) -> Any:
    scale = _find_scale()
    return original(*args, **named) if scale is None else compute_scaled_gradients(scale, original, *args, **named)
