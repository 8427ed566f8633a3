"""Turns on, during a run, the forms of TensorFlow 1's variables and control flow that can be distributed."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from whale.frontends.tf1.taking import find_spread_run, replace_function
from whale.log import log

_SWITCHES = {
    "resource variables": ("enable_resource_variables", "disable_resource_variables", "resource_variables_enabled"),
    "control flow of version 2": ("enable_control_flow_v2", "disable_control_flow_v2", "control_flow_v2_enabled"),
}


def patch_switches() -> None:
    """Patches ``disable_v2_behavior`` to leave both as they are during a run."""
    for _, name, _ in _SWITCHES.values():
        replace_function(getattr(tf.compat.v1, name), _keep_behavior)


def _keep_behavior(original: Callable[[], None]) -> None:
    if find_spread_run() is None:
        original()


def turn_on() -> None:
    """Turns on what is off, until the end of the run, and logs it."""
    context = find_spread_run()
    if context is None:
        return
    v1 = tf.compat.v1
    off = {what: names for what, names in _SWITCHES.items() if not getattr(v1, names[2])()}
    for on, back, _ in off.values():
        getattr(v1, on)()
        context.at_end.append(getattr(v1, back))
    if off and context.rank == 0:
        log.info(f"turned on {' and '.join(off)} for the graphs that are built from now on (call wh.init() before)")
