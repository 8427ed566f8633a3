"""Keeps TensorFlow's own session available where Whale's sessions take the place of ``tf.compat.v1.Session``."""

from __future__ import annotations

from tensorflow.python.client import session


class PlainSession(session.Session):  # type: ignore[misc]
    """A session of this process alone, whatever stands for ``tf.compat.v1.Session`` at the time."""
