"""Makes what TensorFlow does after some seconds follow the first rank's clock, between the same runs on all ranks."""

from __future__ import annotations

import time
from typing import Any

from tensorflow.python.training import basic_session_run_hooks, coordinator

from whale.errors import ProgramError
from whale.frontends.tf1.taking import find_spread_run, replace_method
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context


def patch_timers() -> None:
    """Patches hooks' timers and a supervisor's threads to follow the first rank."""
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
    """Replaces the start of a thread that acts every few seconds: it acts between the session's runs.

    Threads of several ranks would make their runs in different orders.
    """
    context = find_spread_run()
    if context is None:
        original(thread)
        return
    if thread._timer_interval_secs is None:
        raise ProgramError(
            "a thread that acts without pause cannot be spread over ranks",
            given=f"{type(thread).__name__} without timer_interval_secs",
            expected="seconds between its turns, or a queue runner",
            action="give it timer_interval_secs, or act in the loop that trains",
        )
    due_s = time.time()

    def run_turn() -> None:
        nonlocal due_s
        if thread._coord.should_stop():
            context.between_runs.remove(run_turn)
        elif _follow_first_rank(time.time() >= due_s, context):
            due_s = time.time() + thread._timer_interval_secs
            thread.run_loop()

    thread.start_loop()
    run_turn()
    context.between_runs.append(run_turn)
