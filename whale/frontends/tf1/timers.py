"""Makes what TensorFlow does after some seconds follow the first rank's clock, between the same runs on all ranks."""

from __future__ import annotations

import time
from typing import Any

from tensorflow.python.training import basic_session_run_hooks, coordinator

from whale.errors import ProgramError
from whale.frontends.tf1.taking import replace_method, taken
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context


def change() -> None:
    """Patches hooks' timers and a supervisor's threads to follow the first rank."""
    replace_method(basic_session_run_hooks.SecondOrStepTimer, "should_trigger_for_step", _triggers)
    replace_method(coordinator.LooperThread, "start", _start)


def _triggers(original: Any, timer: Any, step: int) -> bool:
    mine = bool(original(timer, step))
    context = taken()
    if context is None or timer._every_secs is None:  # by steps: alike on all ranks
        return mine
    return _first_ranks(mine, context)


def _first_ranks(mine: bool, context: Context) -> bool:
    if not context.between_processes:
        return mine
    key = f"whale/element/{context.elements}"
    context.elements += 1
    said = bytes([mine]) if context.rank == 0 else None
    return bool(context.comms[0].broadcast_bytes(key, said, 0, TURN_TIMEOUT_S)[0])


def _start(original: Any, thread: Any) -> None:
    """Replaces the start of a thread that acts every few seconds: it acts between the session's runs.

    Threads of several ranks would make their runs in different orders.
    """
    context = taken()
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

    def turn() -> None:
        nonlocal due_s
        if thread._coord.should_stop():
            context.between_runs.remove(turn)
        elif _first_ranks(time.time() >= due_s, context):
            due_s = time.time() + thread._timer_interval_secs
            thread.run_loop()

    thread.start_loop()
    turn()
    context.between_runs.append(turn)
