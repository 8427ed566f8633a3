"""Measures how much of the CPUs that this process may use other programs take."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.25  # of the usable CPUs' time: with more, what runs here is visibly slower than on an idle machine
_IDLE_FIELDS = (3, 4)  # idle, and waiting for disks; what follows the eighth is part of the first ones
_FIELDS = 8


class LoadMeter:
    """Measures from its making on what others take; this process and what it started and has waited for are left out.

    Args:
        root: where proc is, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._start_s, self._busy_s, self._own_s = time.monotonic(), self._read_busy_s(), _read_own_s()

    def measure_others(self) -> float:
        """Returns the share of the usable CPUs' time since the start that others took, between 0 and 1."""
        own_s, passed_s = _read_own_s() - self._own_s, time.monotonic() - self._start_s
        all_s = passed_s * len(os.sched_getaffinity(0))
        others_s = self._read_busy_s() - self._busy_s - own_s
        return min(1.0, max(0.0, others_s / all_s)) if all_s else 0.0

    def _read_busy_s(self) -> float:
        """Returns the seconds that the usable CPUs have computed since the machine started, for whomever."""
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in (self._root / "proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name in names:
                ticks += sum(int(n) for field, n in enumerate(numbers[:_FIELDS]) if field not in _IDLE_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")


def _read_own_s() -> float:
    """Returns the seconds of CPUs that this process and its ended children have taken."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def format_load(others: float) -> str:
    """Says what share of the usable CPUs others take."""
    count = len(os.sched_getaffinity(0))
    return f"other programs take {others:.0%} of the {count} usable CPU{'s' * (count != 1)}"
