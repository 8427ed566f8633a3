"""Makes ``tf.compat.v1.Session`` and its kinds Whale's while a run goes on, under all of their names.

Not the names are replaced, but what their calls make: TensorFlow's own modules, and those that have imported the
classes before, get Whale's sessions too, and a session of Whale, which inherits from them, is what it says it is.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session

from whale.frontends.tf1.taking import find_spread_run, replace_function, replace_method


def patch_sessions() -> None:
    """Patches the classes to make Whale's sessions during a run."""
    for kind in (session.Session, session.InteractiveSession):
        kind.__new__ = staticmethod(_make_session)
    replace_function(tf.compat.v1.train.MonitoredTrainingSession, _init_monitored)
    replace_method(tf.compat.v1.train.Supervisor, "__init__", _init_supervisor)


def _make_session(kind: type, *args: Any, **kwargs: Any) -> Any:
    made = kind
    if kind in (session.Session, session.InteractiveSession) and find_spread_run() is not None:
        from whale.runtime.session.session import InteractiveSession, Session

        made = Session if kind is session.Session else InteractiveSession
    return object.__new__(made)


def _init_monitored(original: Any, master: str = "", is_chief: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Makes every rank a chief, so that all have the same hooks and make the same runs."""
    return original(master, is_chief or find_spread_run() is not None, *args, **kwargs)


def _init_supervisor(original: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs)
    if find_spread_run() is not None:
        given.arguments["is_chief"] = True
    original(*given.args, **given.kwargs)
