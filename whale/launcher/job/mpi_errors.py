"""Explains by what MPI printed why the script of a rank could not start it."""

from __future__ import annotations

import os
import re

from whale.ir.plan_text import format_bytes
from whale.launcher.shm_cleanup import MEMORY

_NO_SPACE = re.compile(
    r"not enough space for (?P<path>\S+).*?Space Requested:\s*(?P<asked>\d+) B\s*Space Available:\s*(?P<free>\d+) B",
    re.DOTALL,
)
_SHOWN_LINES = 8
_RULE = re.compile(r"-{20,}")


def explain_start(said: str) -> str:
    """Returns lines that say why MPI did not start, and what to do.

    Args:
        said: what mpirun and MPI printed.
    """
    if found := _NO_SPACE.search(said):
        folder = MEMORY if found["path"].startswith(f"{MEMORY}/") else os.path.dirname(found["path"])
        free, asked = format_bytes(int(found["free"])), format_bytes(int(found["asked"]))
        return (
            f"  cause: too little memory for files in {folder}: {free} are free, and each rank takes {asked}\n"
            f"  next: enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g {folder}), or remove what "
            "others left there; then `whale doctor`"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _RULE.search(line)]
    shown = "".join(f"\n    {line}" for line in lines[:_SHOWN_LINES]) or "nothing"
    return f"  mpi_said: {shown}\n  next: see all of it with -v; `whale doctor` looks for what stops a run here"
