"""A training step of real processes beside the step of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool, flavours

SCRIPT = str(Path(__file__).with_name("case_on_ranks.py"))


def check_processes(
    launcher: Launcher,
    pool: Pool,
    folder: Path,
    case: str,
    optimizer: str,
    shares: str,
    scope: str = "replica",
    under: Sequence[str] = (),
    timeout_s: float = 180,
) -> str:
    """All ranks hold the same, and it is what one device has, in float64.

    Args:
        shares: rows of each rank, "5,3"; "even,even" for two ranks that divide them evenly.
        scope: of case_on_ranks.py.
        under: options of `whale run`, then a script that runs that one, and its first arguments.

    Returns:
        What the run said.
    """
    wanted = pool.reference(flavours()[0], case, "float64", optimizer)
    size = len(shares.split(","))
    rows = "even" if "even" in shares else shares
    arguments = [*under, SCRIPT, case, "float64", optimizer, rows, str(folder), scope]
    done = launcher.run("-np", str(size), *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [load(folder / f"{rank}.npz") for rank in range(size)]
    worst = difference(load(wanted["path"]), results[0], wanted["floor"])
    assert worst.error <= limit("float64", 0.0), worst
    for rank, other in enumerate(results):
        assert other.keys() == results[0].keys()
        for name, value in other.items():
            assert np.array_equal(value, results[0][name]), f"rank {rank} has another {name} than rank 0"
    return done.stdout + done.stderr
