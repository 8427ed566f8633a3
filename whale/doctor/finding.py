"""Defines what one check of `whale doctor` reports."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

COMMAND_TIMEOUT_S = 10.0
Status = Literal["ok", "none", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was looked at.
        status: ``problem`` stops a run, ``warning`` slows it or stops part of it, ``none`` is absent and not needed.
        text: what is there.
        action: what to do about a problem or warning.
    """

    name: str
    status: Status
    text: str
    action: str | None = None


def read_output(command: Sequence[str]) -> str | None:
    """Returns what a command prints, or None if it does not run, fails, or does not end within `COMMAND_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
