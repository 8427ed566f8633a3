"""Makes ``MonitoredTrainingSession``: TensorFlow's, with its hooks and Scaffold, around a ``wh.Session``."""

from __future__ import annotations

from typing import Any

from tensorflow.python.training import monitored_session

from whale.frontends.tf1.activation import force_sessions
from whale.runtime.context import require_current


def MonitoredTrainingSession(*args: Any, **kwargs: Any) -> Any:
    """Replaces tf.compat.v1.train.MonitoredTrainingSession, with the same arguments; every rank makes one.

    Every rank has the hooks, and they make the same runs everywhere. What a hook of TensorFlow does after some seconds,
    it does when the first rank's clock says so. After ``wh.init`` TensorFlow's own function does the same.

    Args:
      args, kwargs: see tf.compat.v1.train.MonitoredTrainingSession. ``is_chief`` is True on every rank.

    Returns:
      a tf.compat.v1.train.MonitoredSession.

    Raises:
      ClusterError: made before ``wh.init``.
      ProgramError: ``master`` names a server.
    """
    require_current("MonitoredTrainingSession")
    with force_sessions():
        return monitored_session.MonitoredTrainingSession(*args, **kwargs)
