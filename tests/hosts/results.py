"""Reads the losses and weights that runs of train.py leave, on hosts and in one process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from tests.forkserver import warm_python
from tests.hosts.hosts import HERE, python_environment

TRAIN = str(HERE / "train.py")


def read_result(folder: Path) -> dict[str, np.ndarray]:
    """Returns what a run of train.py has left, and removes it."""
    path = folder / "result.npz"
    found = dict(np.load(path))
    path.unlink()
    return found


def train_alone(folder: Path, steps: int = 3, script: str = TRAIN) -> dict[str, np.ndarray]:
    """Returns what one process computes."""
    line = [warm_python(), script, str(folder), str(steps)]
    subprocess.run(
        line, env={"PATH": "/usr/bin:/bin", **python_environment()}, stdout=subprocess.DEVNULL, check=True, timeout=120
    )
    return read_result(folder)
