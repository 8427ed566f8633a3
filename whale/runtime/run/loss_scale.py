"""The scale of a run's losses under ``amp.dtype=float16``."""

from __future__ import annotations

from whale.capture.scaling import LossScale
from whale.errors import ConfigError
from whale.runtime.run.context import Context, current


def loss_scale_of(context: Context) -> LossScale | None:
    """The scale that all steps of the run share, made for the first one; None where losses are not scaled."""
    config = context.config
    if config["amp.level"] != "O1" or config["amp.dtype"] != "float16":
        return None
    if context.loss_scale is None:
        from whale.capture.scaling import LossScale

        context.loss_scale = LossScale(config["amp.initial_scale"], config["amp.growth_steps"])
    return context.loss_scale


def loss_scale() -> float:
    """What losses are multiplied by at present, under ``amp.dtype="float16"``; a step that overflows halves it.

    Under ``wh.stage`` all ranks have to ask, as for other values of variables.

    Raises:
      ClusterError: called before ``wh.init``.
      ConfigError: losses are not scaled.
    """
    found = loss_scale_of(current("wh.loss_scale()"))
    if found is None:
        raise ConfigError(
            "losses are not scaled",
            expected='amp.level="O1" and amp.dtype="float16"',
            action="set both, or leave wh.loss_scale() out",
        )
    return float(found.scale.numpy())
