"""What is left behind when the ranks of a run become others, again and again: memory, threads, descriptors.

    whale run -np 2 -m tests.elastic.leaks --rounds 50 [--mode zero3]

In every round each rank is told that the ranks have changed, as by a death, but for that nobody is gone: they end the
step, meet, bring parts of variables together, connect anew and compile for the same ranks, so that a round takes no
process's start. Exit code 1 if there are more threads or descriptors at the end than after a fifth of the rounds, or
more than `GROWS_BYTES` a round more memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from pathlib import Path

import whale as wh
from tests.elastic.script import CONFIGURED, Net, data
from whale.runtime.context import find_running

GROWS_BYTES = 192 << 10  # TensorFlow keeps something of the functions that it has compiled and forgotten


def held() -> tuple[int, int, int]:
    """(bytes of memory, threads, descriptors) of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10, int(fields["Threads"]), len(os.listdir("/proc/self/fd"))


def main() -> int:
    """Exit code of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--mode", default="loop")
    asked = parser.parse_args()
    wh.init({"fault.elastic": "memory", **CONFIGURED.get(asked.mode, {})})
    with wh.replica():
        net, batch = Net({asked.mode}), next(iter(data()))
        found = []
        for _ in range(asked.rounds):
            net.step(*batch)
            find_running().watch._hear({"rank": None, "joined": [], "goes_on": True})
            net.step(*batch)
            found.append(held())
    wrong = 0
    settled = found[len(found) // 5 :]
    quarter = max(1, len(settled) // 4)
    kinds = ("memory, MiB", 1 << 20, GROWS_BYTES * len(settled)), ("threads", 1, 0), ("descriptors", 1, 0)
    for (name, unit, most), values in zip(kinds, zip(*settled)):
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        wrong += last - first > most
        print(f"{name}: {first / unit:.1f} after {len(found) // 5} rounds, {last / unit:.1f} after {len(found)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
