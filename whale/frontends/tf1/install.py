"""Replaces TensorFlow 1's sessions, and what writes files beside them, by Whale's while a run goes on."""

from __future__ import annotations

from tensorflow.python.client import session

from whale.frontends.tf1 import estimators, optimizers, scaling, sessions, switches, timers, writing
from whale.frontends.when_imported import change_when_imported


def install() -> None:
    """Changes TensorFlow once; where no run goes on it does what it always did. Each run turns its switches on."""
    if not hasattr(session.Session, "_whale_changed"):
        session.Session._whale_changed = True
        sessions.patch_sessions()
        timers.patch_timers()
        writing.patch_writers()
        switches.patch_switches()
        optimizers.patch_optimizers()
        scaling.patch_gradients()
    change_when_imported(estimators.MODULES, estimators.patch_estimators)
    switches.turn_on()
