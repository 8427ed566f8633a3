"""Replaces TensorFlow 1's sessions, and what writes files beside them, by Whale's while a run goes on."""

from __future__ import annotations

from tensorflow.python.client import session

from whale.frontends.tf1 import estimators, optimizers, scaling, sessions, switches, timers, writing
from whale.frontends.when_imported import when_imported


def install() -> None:
    """Changes TensorFlow once; where no run goes on it does what it always did. Each run turns its switches on."""
    if not hasattr(session.Session, "_whale_changed"):
        session.Session._whale_changed = True
        for part in (sessions, timers, writing, switches, optimizers, scaling):
            part.change()
    when_imported(estimators.MODULES, estimators.change)
    switches.turn_on()
