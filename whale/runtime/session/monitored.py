"""``wh.MonitoredTrainingSession``: TensorFlow's own, with its hooks and Scaffold, around a ``wh.Session``."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.training import basic_session_run_hooks, monitored_session, session_manager

from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context, current
from whale.runtime.session.session import Session


def MonitoredTrainingSession(*args: Any, **kwargs: Any) -> Any:
    """Takes the place of tf.compat.v1.train.MonitoredTrainingSession, with the same arguments; every rank makes it.

    Every rank has the hooks, and they make the same runs everywhere. What a hook of TensorFlow does after some seconds,
    it does when the first rank's clock says so.

    Args:
      args, kwargs: see tf.compat.v1.train.MonitoredTrainingSession. ``is_chief`` stays True on every rank.

    Returns:
      a tf.compat.v1.train.MonitoredSession.

    Raises:
      ClusterError: made before ``wh.init``.
      ProgramError: ``master`` names a server.
    """
    context = current("wh.MonitoredTrainingSession")

    def monitored(session_creator: Any, hooks: Sequence[Any], **more: Any) -> Any:
        for hook in hooks if context.between_processes else ():
            timer = getattr(hook, "_timer", None)
            if isinstance(timer, basic_session_run_hooks.SecondOrStepTimer):
                hook._timer = _FirstRanksTimer(timer, context)
        return tf.compat.v1.train.MonitoredSession(session_creator, hooks, **more)

    make = _with(
        monitored_session.MonitoredTrainingSession, ChiefSessionCreator=_SessionCreator, MonitoredSession=monitored
    )
    return make(*args, **kwargs)


def _with(function: Callable[..., Any], **names: Any) -> Any:
    """A function of TensorFlow's for which global names mean something else."""
    found = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


class _SessionManager(session_manager.SessionManager):  # type: ignore[misc]
    _restore_checkpoint = _with(
        session_manager.SessionManager._restore_checkpoint, session=types.SimpleNamespace(Session=Session)
    )


class _SessionCreator(monitored_session.ChiefSessionCreator):  # type: ignore[misc]
    def _get_session_manager(self) -> Any:
        manager = super()._get_session_manager()
        manager.__class__ = _SessionManager
        return manager


class _FirstRanksTimer:
    """A hook's timer that triggers on every rank when it does on the first one."""

    def __init__(self, own: Any, context: Context):
        self._own, self._context = own, context

    def should_trigger_for_step(self, step: int) -> bool:
        mine = bool(self._own.should_trigger_for_step(step))
        if self._own._every_secs is None:  # by steps: alike on all ranks
            return mine
        key = f"whale/element/{self._context.elements}"
        self._context.elements += 1
        said = bytes([mine]) if self._context.rank == 0 else None
        return bool(self._context.comms[0].broadcast_bytes(key, said, 0, TURN_TIMEOUT_S)[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
