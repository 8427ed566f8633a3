"""Makes the scale of a run's losses under ``amp.dtype=float16``."""

from __future__ import annotations

from whale.capture.scaling import FedScale, LossScale
from whale.errors import ConfigError
from whale.runtime.run.context import Context, current


def loss_scale_of(context: Context) -> LossScale | None:
    """Returns the scale that all steps of the run share, made for the first one; None where losses are not scaled."""
    config = context.config
    if config["amp.level"] != "O1" or config["amp.dtype"] != "float16":
        return None
    if context.loss_scale is None:
        context.loss_scale = LossScale(config["amp.initial_scale"], config["amp.growth_steps"])
    return context.loss_scale


def fed_scale_of(context: Context) -> FedScale | None:
    """Returns the scale of the losses of graphs that sessions run; None where losses are not scaled."""
    config = context.config
    if config["amp.level"] != "O1" or config["amp.dtype"] != "float16":
        return None
    if context.fed_scale is None:
        context.fed_scale = FedScale(config["amp.initial_scale"], config["amp.growth_steps"])
    return context.fed_scale


def loss_scale() -> float:
    """Returns what losses are multiplied by at present, under ``amp.dtype="float16"``; a step that overflows halves it.

    Under ``wh.stage`` all ranks have to ask, as for other values of variables.

    Raises:
      ClusterError: called before ``wh.init``.
      ConfigError: losses are not scaled.
    """
    context = current("wh.loss_scale()")
    if context.fed_scale is not None and context.loss_scale is None:
        return context.fed_scale.scale
    found = loss_scale_of(context)
    if found is None:
        raise ConfigError(
            "losses are not scaled",
            expected='amp.level="O1" and amp.dtype="float16"',
            action="set both, or leave wh.loss_scale() out",
        )
    return float(found.scale.numpy())
