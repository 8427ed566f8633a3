"""Runs drawn programs on one device and on ranks, and compares what they give."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.forkserver import plain_python
from tests.launcher.helpers import Launcher
from tests.oracle.metric import FLOAT64_LIMIT

SCRIPT = str(Path(__file__).with_name("on_ranks.py"))
FLOOR = 1e-3  # a loss that is smaller is as near as one of this size


def run(launcher: Launcher, kind: str, place: str, folder: Path, numbers: Sequence[int], timeout_s: float) -> None:
    """Runs programs ``plain``, on the ``ranks`` of a run of two, or on a number of ranks of one process."""
    arguments = [SCRIPT, kind, place, str(folder), *map(str, numbers)]
    alone = plain_python() if place == "plain" else launcher.python
    if place == "ranks":
        done = launcher.run("-np", "2", *arguments, timeout_s=timeout_s)
    else:
        done = subprocess.run(
            [alone, *arguments],
            env=launcher.environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0 and "programs done" in done.stdout, done.stdout + done.stderr


def differences(folder: Path, number: int) -> Iterator[tuple[float, str]]:
    """(the largest relative difference of a rank from one device, what has it)."""
    wanted = np.load(folder / f"plain_{number}.npz")
    for path in sorted(folder.glob(f"rank*_{number}.npz")):
        found = np.load(path)
        worst, where = 0.0, ""
        for name in sorted({*wanted.files, *found.files}):
            if name not in wanted.files or name not in found.files or wanted[name].shape != found[name].shape:
                yield float("inf"), f"{path.name}: {name}"
                break
            if not wanted[name].size:
                continue
            error = np.max(np.abs(wanted[name] - found[name])) / max(np.max(np.abs(wanted[name])), FLOOR)
            if not error <= worst:  # NaN is an error, too
                worst, where = float(error) if np.isfinite(error) else float("inf"), f"{path.name}: {name}"
        else:
            yield worst, where


def check(launcher: Launcher, kind: str, place: str, folder: Path, numbers: Sequence[int], timeout_s: float) -> None:
    """Asserts that programs give on ranks what they give on one device."""
    for where in ("plain", place):
        run(launcher, kind, where, folder, numbers, timeout_s)
    for number in numbers:
        found = list(differences(folder, number))
        assert found and max(found)[0] <= FLOAT64_LIMIT, (number, found)
