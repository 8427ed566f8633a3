"""Takes gradients of version 1 graphs of scaled losses, while a run computes in float16."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from whale.capture.scaling import FedScale, scaled_gradients, scaled_tape
from whale.frontends.tf1.taking import replace_method, taken
from whale.runtime.run.loss_scale import fed_scale_of


def change() -> None:
    """Patches ``tf.gradients``, and a tape's, to scale losses and unscale gradients during such a run."""
    replace_method(tf.GradientTape, "gradient", _of_tape)
    replace_method(gradients_util, "_GradientsHelper", _of_graph)


def _scale() -> FedScale | None:
    context = taken()
    if context is None or context.own_programs is not None or ops.executing_eagerly_outside_functions():
        return None  # a step that is a function has a scale of its own: see whale.capture.function
    return fed_scale_of(context)


def _of_tape(original: Any, *args: Any, **named: Any) -> Any:
    scale = _scale()
    return original(*args, **named) if scale is None else scaled_tape(scale, original, *args, **named)


def _of_graph(original: Any, *args: Any, **named: Any) -> Any:
    scale = _scale()
    return original(*args, **named) if scale is None else scaled_gradients(scale, original, *args, **named)
