"""Replaces TensorFlow 1's sessions, and Python functions that write files, by Whale's for the time of a run.

Decision: 0066.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util
from tensorflow.python.training import basic_session_run_hooks, coordinator

from whale.capture.loss_scaling import LossScaleFeed, compute_scaled_gradients, compute_scaled_tape_gradient
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import ProgramError
from whale.frontends.tf1 import patches
from whale.frontends.tf1.activation import find_spread_run, replace_function, replace_method
from whale.imports import change_when_imported
from whale.log import log
from whale.runtime.context import Context
from whale.runtime.loss_scale import find_loss_scale_feed

_SWITCHES = {
    "resource variables": ("enable_resource_variables", "disable_resource_variables", "resource_variables_enabled"),
    "control flow of version 2": ("enable_control_flow_v2", "disable_control_flow_v2", "control_flow_v2_enabled"),
}


def install() -> None:
    """Patches TensorFlow 1, once per process, and turns on resource variables and control flow v2 for the run.

    Without a run, the patched classes behave as before.
    """
    if not hasattr(session.Session, "_whale_changed"):
        session.Session._whale_changed = True
        patch_sessions()
        patch_timers()
        patches.patch_writers()
        patch_switches()
        patches.patch_optimizers()
        patch_gradients()
    change_when_imported(patches.ESTIMATOR_MODULES, patches.patch_estimators)
    turn_on_switches()


# ``Session.__new__`` is replaced, not the name ``tf.compat.v1.Session``. So modules that have imported the class before
# (TensorFlow's own, too) get Whale's sessions, and isinstance still holds, since Whale's sessions inherit from it.
def patch_sessions() -> None:
    """Patches session classes and functions so that they create Whale's sessions during a run."""
    for kind in (session.Session, session.InteractiveSession):
        kind.__new__ = staticmethod(_make_session)
    replace_function(tf.compat.v1.train.MonitoredTrainingSession, _init_monitored)
    replace_method(tf.compat.v1.train.Supervisor, "__init__", _init_supervisor)


def _make_session(kind: type, *args: Any, **kwargs: Any) -> Any:
    made = kind
    if kind in (session.Session, session.InteractiveSession) and find_spread_run() is not None:
        from whale.frontends.tf1.session import InteractiveSession, Session

        made = Session if kind is session.Session else InteractiveSession
    return object.__new__(made)


def _init_monitored(original: Any, master: str = "", is_chief: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Replaces the constructor of MonitoredTrainingSession (``original``): every rank is a chief, so that all ranks
    have the same hooks and make the same runs.
    """
    return original(master, is_chief or find_spread_run() is not None, *args, **kwargs)


def _init_supervisor(original: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs)
    if find_spread_run() is not None:
        given.arguments["is_chief"] = True
    original(*given.args, **given.kwargs)


def patch_gradients() -> None:
    """Patches ``tf.gradients`` and ``GradientTape.gradient`` to scale losses and unscale gradients during a float16
    run.
    """
    replace_method(tf.GradientTape, "gradient", _wrap_tape_gradient)
    replace_method(gradients_util, "_GradientsHelper", _wrap_graph_gradients)


def _find_scale() -> LossScaleFeed | None:
    context = find_spread_run()
    if context is None or context.planning.own_programs is not None or ops.executing_eagerly_outside_functions():
        return None  # steps of wh.function have a loss scale of their own: see whale.capture.function
    return find_loss_scale_feed(context)


def _wrap_tape_gradient(original: Any, *args: Any, **named: Any) -> Any:
    scale = _find_scale()
    return original(*args, **named) if scale is None else compute_scaled_tape_gradient(scale, original, *args, **named)


def _wrap_graph_gradients(original: Any, *args: Any, **named: Any) -> Any:
    scale = _find_scale()
    return original(*args, **named) if scale is None else compute_scaled_gradients(scale, original, *args, **named)


def patch_switches() -> None:
    """Patches ``disable_resource_variables`` and ``disable_control_flow_v2`` so that they do nothing during a run.

    Scripts call these through ``disable_v2_behavior``.
    """
    for _, name, _ in _SWITCHES.values():
        replace_function(getattr(tf.compat.v1, name), _keep_behavior)


def _keep_behavior(original: Callable[[], None]) -> None:
    if find_spread_run() is None:
        original()


def turn_on_switches() -> None:
    """Turns on resource variables and control flow v2 until the end of the run, and logs which of them were off."""
    context = find_spread_run()
    if context is None:
        return
    v1 = tf.compat.v1
    off = {what: names for what, names in _SWITCHES.items() if not getattr(v1, names[2])()}
    for on, back, _ in off.values():
        getattr(v1, on)()
        context.hooks.at_end.append(getattr(v1, back))
    if off and context.rank == 0:
        log.info(
            f"turned on {' and '.join(off)} for graphs that are built from now on; call wh.init() before the graph is "
            "built"
        )


def patch_timers() -> None:
    """Makes hooks and Supervisor threads that act every few seconds follow rank 0's clock."""
    replace_method(basic_session_run_hooks.SecondOrStepTimer, "should_trigger_for_step", _should_trigger)
    replace_method(coordinator.LooperThread, "start", _start)


def _should_trigger(original: Any, timer: Any, step: int) -> bool:
    mine = bool(original(timer, step))
    context = find_spread_run()
    if context is None or timer._every_secs is None:  # by steps: alike on all ranks
        return mine
    return _follow_first_rank(mine, context)


def _follow_first_rank(mine: bool, context: Context) -> bool:
    if not context.has_other_processes:
        return mine
    key = f"whale/element/{context.elements}"
    context.elements += 1
    said = bytes([mine]) if context.rank == 0 else None
    return bool(context.comms[0].broadcast_bytes(key, said, 0, TURN_TIMEOUT_S)[0])


def _start(original: Any, thread: Any) -> None:
    """Replaces ``start`` of a Supervisor's thread (``original``): its periodic work is done between the session's runs
    instead of in a thread.

    Otherwise threads on different ranks would start runs in different orders.
    """
    context = find_spread_run()
    if context is None:
        original(thread)
        return
    if thread._timer_interval_secs is None:
        raise ProgramError(
            "a LooperThread without an interval cannot be distributed: its runs would have no common order on ranks",
            given=f"{type(thread).__name__} without timer_interval_secs",
            expected="a thread with timer_interval_secs, or a queue runner",
            action="pass timer_interval_secs to the thread, or do its work in the training loop",
        )
    due_s = time.time()

    def run_turn() -> None:
        nonlocal due_s
        if thread._coord.should_stop():
            context.hooks.between_runs.remove(run_turn)
        elif _follow_first_rank(time.time() >= due_s, context):
            due_s = time.time() + thread._timer_interval_secs
            thread.run_loop()

    thread.start_loop()
    run_turn()
    context.hooks.between_runs.append(run_turn)
