"""Creates the run's loss scale for training in float16 (``precision.compute_dtype=float16``)."""

from __future__ import annotations

from whale.capture.loss_scaling import LossScale, LossScaleFeed
from whale.config import Config
from whale.errors import ConfigError
from whale.runtime.context import Context, require_current

FIRST_SCALE, GROWTH_STEPS = 2.0**15, 2000  # the defaults of Keras' LossScaleOptimizer, for a scale that adapts
_NEVER = 2**31 - 1  # growth steps of a fixed scale: it never grows


def _first_and_growth(config: Config) -> tuple[float, int]:
    """Returns the initial loss scale, and the number of steps without overflow after which it grows."""
    fixed = config["precision.loss_scale"]
    return (fixed, _NEVER) if fixed else (FIRST_SCALE, GROWTH_STEPS)


def find_loss_scale(context: Context) -> LossScale | None:
    """Returns the loss scale that all steps of the run share, and creates it for the first step; None unless the run
    computes in float16.
    """
    config = context.config
    if config["precision.compute_dtype"] != "float16":
        return None
    if context.scaling.loss_scale is None:
        context.scaling.loss_scale = LossScale(*_first_and_growth(config))
    return context.scaling.loss_scale


def find_loss_scale_feed(context: Context) -> LossScaleFeed | None:
    """Returns the loss scale that is fed to graphs of sessions, and creates it for the first one; None unless the run
    computes in float16.
    """
    config = context.config
    if config["precision.compute_dtype"] != "float16":
        return None
    if context.scaling.fed_scale is None:
        context.scaling.fed_scale = LossScaleFeed(*_first_and_growth(config))
    return context.scaling.fed_scale


def loss_scale() -> float:
    """Returns the present loss scale in float16; a step whose gradients overflow halves it.

    Under ``wh.stage`` all ranks have to call it, as when they read a variable.

    Raises:
      ClusterError: called before ``wh.init``.
      ConfigError: the run does not compute in float16, so losses are not scaled.
    """
    context = require_current("wh.loss_scale()")
    if context.scaling.fed_scale is not None and context.scaling.loss_scale is None:
        return context.scaling.fed_scale.scale
    found = find_loss_scale(context)
    if found is None:
        raise ConfigError(
            "losses are not scaled, so there is no loss scale",
            given=f"wh.loss_scale() with precision.compute_dtype={context.config['precision.compute_dtype']!r}",
            expected='precision.compute_dtype="float16"',
            action="set precision.compute_dtype in wh.init, or leave wh.loss_scale() out",
        )
    return float(found.scale.numpy())
