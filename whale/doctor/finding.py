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
    """Represents the result of one check.

    Attributes:
        name: what was checked.
        status: ``ok``; ``problem`` stops runs; ``warning`` slows them, or stops some kinds of them; ``none``: absent,
            and not needed.
        text: what was found.
        action: what to do about a problem or warning; None if there is none.
    """

    name: str
    status: Status
    text: str
    action: str | None = None


def read_output(command: Sequence[str]) -> str | None:
    """Runs a command and returns its stdout; None if it cannot run, fails, or takes more than `COMMAND_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
