"""Makes the scale of a run's losses under ``amp.dtype=float16``."""

from __future__ import annotations

from whale.capture.scaling import LossScale, LossScaleFeed
from whale.errors import ConfigError
from whale.runtime.run.context import Context, require_current


def find_loss_scale(context: Context) -> LossScale | None:
    """Returns the scale that all steps of the run share, made for the first one; None where losses are not scaled."""
    config = context.config
    if config["amp.level"] != "O1" or config["amp.dtype"] != "float16":
        return None
    if context.loss_scale is None:
        context.loss_scale = LossScale(config["amp.initial_scale"], config["amp.growth_steps"])
    return context.loss_scale


def find_loss_scale_feed(context: Context) -> LossScaleFeed | None:
    """Returns the scale of the losses of graphs that sessions run; None where losses are not scaled."""
    config = context.config
    if config["amp.level"] != "O1" or config["amp.dtype"] != "float16":
        return None
    if context.fed_scale is None:
        context.fed_scale = LossScaleFeed(config["amp.initial_scale"], config["amp.growth_steps"])
    return context.fed_scale


def loss_scale() -> float:
    """Returns what losses are multiplied by at present, under ``amp.dtype="float16"``; a step that overflows halves it.

    Under ``wh.stage`` all ranks have to ask, as for other values of variables.

    Raises:
      ClusterError: called before ``wh.init``.
      ConfigError: losses are not scaled.
    """
    context = require_current("wh.loss_scale()")
    if context.fed_scale is not None and context.loss_scale is None:
        return context.fed_scale.scale
    found = find_loss_scale(context)
    if found is None:
        raise ConfigError(
            "losses are not scaled",
            expected='amp.level="O1" and amp.dtype="float16"',
            action="set both, or leave wh.loss_scale() out",
        )
    return float(found.scale.numpy())
