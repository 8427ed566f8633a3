"""A training step of real processes through a backend, beside the step of one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.distributed.test_cases import SCRIPT
from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool, flavours


def check_backend(
    launcher: Launcher, pool: Pool, folder: Path, backend: str, case: str, optimizer: str, shares: str, timeout_s: float
) -> None:
    """All ranks hold the same, and it is what one device has, in float64. ``shares``: rows of each rank."""
    wanted = pool.reference(flavours()[0], case, "float64", optimizer)
    launcher.environment["WHALE_COMMUNICATION_BACKEND"] = backend
    size = len(shares.split(","))
    arguments = [case, "float64", optimizer, shares, str(folder), "replica"]
    done = launcher.run("-np", str(size), SCRIPT, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [load(folder / f"{rank}.npz") for rank in range(size)]
    worst = difference(load(wanted["path"]), results[0], wanted["floor"])
    assert worst.error <= limit("float64", 0.0), worst
    for other in results[1:]:
        assert all(np.array_equal(value, results[0][name]) for name, value in other.items())
