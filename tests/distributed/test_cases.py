"""Cases of the oracle with real processes over MPI."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool, flavours

SCRIPT = str(Path(__file__).with_name("case_on_ranks.py"))


@pytest.mark.parametrize(
    ("case", "optimizer", "shares", "scope"),
    [
        pytest.param("mlp", "adam", "5,3", "replica", marks=pytest.mark.core),
        pytest.param("mlp_metrics", "sgd", "4,0,4", "replica"),
        pytest.param("convnet", "sgd", "even,even,even", "replica"),
        pytest.param("tf1_mlp", "adam", "2,6", "zero", marks=pytest.mark.core),
        pytest.param("embedding", "adam", "even,even,even", "split", marks=pytest.mark.core),
        pytest.param("convnet", "adam", "even,even,even,even", "split:2"),
        pytest.param("gpt", "adam", "5,3", "zero", marks=pytest.mark.core),
        pytest.param("mlp_metrics", "adam", "even,even,even,even", "stage:2"),
        pytest.param("tf1_mlp", "adam", "even,even", "stage:2", marks=pytest.mark.core),
    ],
)
def test_processes_compute_what_one_device_computes(
    launcher: Launcher, pool: Pool, tmp_path: Path, case: str, optimizer: str, shares: str, scope: str
) -> None:
    wanted = pool.reference(flavours()[0], case, "float64", optimizer)
    size = len(shares.split(","))
    rows = "even" if "even" in shares else shares
    arguments = [case, "float64", optimizer, rows, str(tmp_path), scope]
    done = launcher.run("-np", str(size), SCRIPT, *arguments, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [load(tmp_path / f"{rank}.npz") for rank in range(size)]
    worst = difference(load(wanted["path"]), results[0], wanted["floor"])
    assert worst.error <= limit("float64", 0.0), worst
    for rank, other in enumerate(results):
        assert other.keys() == results[0].keys()
        for name, value in other.items():
            assert np.array_equal(value, results[0][name]), f"rank {rank} has another {name} than rank 0"
