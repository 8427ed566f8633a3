"""Control groups of ranks whose share of the processor is limited (Linux, as root, either version)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPU = Path("/sys/fs/cgroup/cpu")  # version 1
UNIFIED = Path("/sys/fs/cgroup")
NAME = "whale_quota_{}"
FIRST = 64  # times the processor time that a task outside gets, while a group's quota lasts


class Quota:
    """A control group of one rank."""

    def __init__(self, rank: int, period_us: int) -> None:
        self.period_us = period_us
        self.first = (CPU / "cpu.cfs_quota_us").exists() or CPU.is_dir()
        self.folder = (CPU if self.first else UNIFIED) / NAME.format(rank)
        self.cores = 0.0

    def make(self) -> None:
        """Makes the group.

        Raises:
            OSError: control groups cannot be written.
        """
        if not self.first:
            (UNIFIED / "cgroup.subtree_control").write_text("+cpu")
        self.folder.mkdir(exist_ok=True)

    def be_first(self) -> None:
        """What else runs on the machine takes little of what the quota grants."""
        if self.first:
            (self.folder / "cpu.shares").write_text(str(FIRST * 1024))
        else:
            (self.folder / "cpu.weight").write_text(str(FIRST * 100))

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def set(self, cores: float) -> None:
        quota_us = max(1000, round(cores * self.period_us))
        self.cores = quota_us / self.period_us
        if self.first:
            (self.folder / "cpu.cfs_quota_us").write_text("-1")
            (self.folder / "cpu.cfs_period_us").write_text(str(self.period_us))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {self.period_us}")

    def remove(self) -> None:
        self.folder.rmdir()


@contextmanager
def groups(ranks: int, period_us: int) -> Iterator[None]:
    """Control groups for so many ranks, removed at the end."""
    made = [Quota(rank, period_us) for rank in range(ranks)]
    for one in made:
        one.make()
    try:
        yield
    finally:
        for one in made:
            for _ in range(50):
                try:
                    one.remove()
                    break
                except OSError:  # its last process is about to end
                    time.sleep(0.1)
