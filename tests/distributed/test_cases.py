"""Cases of the oracle with real processes over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.against_one_device import check_processes
from tests.draws import one_of
from tests.launcher.helpers import Launcher
from tests.oracle.pool import Pool


@pytest.mark.parametrize(
    ("case", "optimizer", "shares", "scope"),
    one_of(
        2,
        [
            pytest.param("mlp", "adam", "5,3", "replica", marks=pytest.mark.core),
            pytest.param("mlp_metrics", "sgd", "4,0,4", "replica", marks=pytest.mark.long),
            pytest.param("convnet", "sgd", "even,even,even", "replica", marks=pytest.mark.long),
            pytest.param("tf1_mlp", "adam", "2,6", "zero", marks=pytest.mark.core),
            pytest.param("embedding", "adam", "even,even,even", "split", marks=pytest.mark.core),
            pytest.param("convnet", "adam", "even,even,even,even", "split:2"),
            pytest.param("tf1_mlp", "adam", "even,even", "stage:2", marks=pytest.mark.core),
            pytest.param("mlp_metrics", "adam", "even,even,even,even", "stage:2"),
            pytest.param("gpt", "adam", "5,3", "zero", marks=[pytest.mark.core, pytest.mark.long]),
        ],
        several=True,
    ),
)
def test_processes_compute_what_one_device_computes(
    launcher: Launcher, pool: Pool, tmp_path: Path, case: str, optimizer: str, shares: str, scope: str
) -> None:
    check_processes(launcher, pool, tmp_path, case, optimizer, shares, scope)
