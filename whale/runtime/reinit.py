"""Handles a second ``init`` of scripts whose library allows it: the run continues with a new configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale.config import Config
from whale.errors import ClusterError
from whale.log import set_level
from whale.runtime.context import Context, LossScales, ScopeState, find_running

# Keys of settings that the ranks were connected with; these stay as they are until ranks are connected again.
_CONNECTED = ("communication.", "fault.", "debug.trace", "debug.emulate")


def begin_again(config: Config | Mapping[str, Any] | None) -> bool:
    """Restarts the present run with another configuration; returns False if there is no run.

    Variables, the ranks' connections and their random states stay.

    Raises:
      ConfigError: an unknown key or a wrong value.
      ClusterError: the ranks would have to be connected in another way.
    """
    context = find_running()
    if context is None:
        return False
    config = config if isinstance(config, Config) else Config(config or {})
    for key in config:
        if key.startswith(_CONNECTED) and config[key] != context.config[key] and key != "communication.wire_dtype":
            raise ClusterError(
                "the ranks of a run that goes on are connected",
                given=f"{key}={config[key]!r} in a second init; the first had {context.config[key]!r}",
                expected="the same value",
                action="set it in the first init, or call wh.shutdown() in between",
            )
    if config.origin("debug.log") != "default":
        set_level(config["debug.log"])
    _forget(context)
    context.config = config
    return True


def _forget(context: Context) -> None:
    context.scoping, context.scaling = ScopeState(), LossScales()
    context.planning.auto = context.planning.saved = context.planning.meaning = context.planning.forecast = None
