"""Facts about the machine that is measured on."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import numpy as np


def free_memory_gb() -> float:
    """Memory that new processes can have, in 10^9 bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1]) / 1e9
    raise RuntimeError("/proc/meminfo does not tell MemAvailable")


def machine() -> str:
    """One line about where it was measured."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores ({name}), load {os.getloadavg()[0]:.1f} when it began"


def busy_s() -> float:
    """Seconds that this machine's cores have been taken, by any process or by other virtual machines."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Pace:
    """How fast a core is now beside the best that was seen, by a fixed piece of work.

    A virtual machine whose neighbours compute is up to twice as slow for seconds or minutes, and no counter tells.
    """

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self._numbers, self._source = draw.random(150_000), draw.random(1 << 20)
        self._copy = np.empty_like(self._source)
        self._best_s = min(self._piece_s() for _ in range(20))

    def slower(self) -> float:
        """By what part the work takes longer than it took at best."""
        now_s = statistics.median(self._piece_s() for _ in range(5))
        self._best_s = min(self._best_s, now_s)
        return now_s / self._best_s - 1

    def _piece_s(self) -> float:
        start_s = time.perf_counter()
        np.sort(self._numbers)
        for _ in range(3):
            np.copyto(self._copy, self._source)
        return time.perf_counter() - start_s
