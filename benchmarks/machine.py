"""Facts about the machine that is measured on."""

from __future__ import annotations

import os
from pathlib import Path


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
