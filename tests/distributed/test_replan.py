"""A run whose steps are far off their prediction goes over to another way, and computes what one device does."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from cost_model.graph.machine_profile import Curve, Operation, write
from tests.cost_model.test_captured import KIND, TABLE
from tests.launcher.helpers import Launcher

ONE_CORE = len(os.sched_getaffinity(0)) < 2
SCRIPT = str(Path(__file__).with_name("replan_on_ranks.py"))


@pytest.mark.parametrize(
    ("how", "strategies"),
    [
        ("function", "rows stages state alone"),
        ("fit", "rows split state rows"),
        pytest.param("function", "rows lent rows lent", marks=pytest.mark.skipif(ONE_CORE, reason="none to lend")),
        pytest.param("function", "split alone stages rows", marks=pytest.mark.long),
        pytest.param("fit", "state rows split state", marks=pytest.mark.long),
    ],
)
def test_moves_change_nothing(launcher: Launcher, how: str, strategies: str) -> None:
    done = launcher.run("-np", "2", SCRIPT, how, "16", *strategies.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3 moves") == 2, done.stdout
    assert done.stderr.count("and the run goes over to it") == 3, done.stderr


def test_elastic_runs_move_together(launcher: Launcher) -> None:
    launcher.environment |= {"WHALE_FAULT_ELASTIC": "memory", "WHALE_FAULT_REBALANCE": "0"}
    done = launcher.run("-np", "2", SCRIPT, "function", "16", *"rows stages state rows".split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3 moves") == 2, done.stdout


def test_a_wrong_profile_is_corrected_for_this_run_and_the_next(launcher: Launcher) -> None:
    """It says that exchanges take no time, of which those of a step take 38 ms here."""
    free = [Curve(kind, 2, [(1e3, 1e-9), (1e6, 1e-8)]) for kind in KIND.split()]
    slow = [Operation("?", "AddV2", 1e6, 12e6, 4e-3), Operation("??", "MatMul", 1e9, 6e6, 0.5)]
    profile = launcher.folder / "profile.json"
    write(msgspec.structs.replace(TABLE, curves=free, operations=slow), profile)
    launcher.environment |= {
        "WHALE_MESH_PROFILE": str(profile),
        "WHALE_MESH_PLAN_CACHE": str(launcher.folder / "plans"),
        "WHALE_DEBUG_EMULATE_NETWORK": "bandwidth_MBps=1,hosts=1+1",
    }
    done = launcher.run("-np", "2", SCRIPT, "profile", "2000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 moves, at last every rank alone") == 2, done.stdout + done.stderr
    assert "ms were predicted; exchanges go on during" in done.stderr, done.stderr
    assert "`every rank alone` is predicted to take" in done.stderr, done.stderr
    again = launcher.run("-np", "2", SCRIPT, "profile", "16")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "every rank alone, predicted" in again.stderr and "(as in an earlier run)" in again.stderr, again.stderr
    assert again.stdout.count("0 moves, at last every rank alone") == 2, again.stdout
