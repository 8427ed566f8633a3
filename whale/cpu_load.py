"""Measures how much of the CPUs that this process may use is used by other programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.25  # fraction of the usable CPUs' time; with more, runs are visibly slower than on an idle machine
_IDLE_FIELDS = (3, 4)  # idle, and waiting for disks; fields after the eighth are contained in the first ones
_FIELDS = 8


class LoadMeter:
    """Measures, from its creation on, how much CPU time other programs use.

    This process, and child processes that have ended and been waited for, do not count.

    Args:
        root: directory that contains proc; tests set it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._start_s, self._busy_s, self._own_s = time.monotonic(), self._read_busy_s(), _read_own_s()

    def measure_others(self) -> float:
        """Returns the fraction (0 to 1) of the usable CPUs' time since the creation that other programs used."""
        own_s, passed_s = _read_own_s() - self._own_s, time.monotonic() - self._start_s
        all_s = passed_s * len(os.sched_getaffinity(0))
        others_s = self._read_busy_s() - self._busy_s - own_s
        return min(1.0, max(0.0, others_s / all_s)) if all_s else 0.0

    def _read_busy_s(self) -> float:
        """Returns the CPU seconds that all programs have used on the usable CPUs since the machine started."""
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in (self._root / "proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name in names:
                ticks += sum(int(n) for field, n in enumerate(numbers[:_FIELDS]) if field not in _IDLE_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")


def _read_own_s() -> float:
    """Returns the CPU seconds that this process and its ended children have used."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def format_load(others: float) -> str:
    """Formats a fraction of `LoadMeter.measure_others` as text."""
    count = len(os.sched_getaffinity(0))
    return f"other programs take {others:.0%} of the {count} usable CPU{'s' * (count != 1)}"
