"""A run started in a checkout, or in any folder with packages named like Whale's, takes the installed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.helpers import ROOT
from whale import python

pytestmark = pytest.mark.core
PACKAGES = ("whale", "whale_ops", "cost_model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('another Whale')")
    return tmp_path


def test_a_run_takes_the_whale_that_started_it(folder: Path) -> None:
    lines = "import mine, whale_ops, cost_model\nprint(whale_ops.__file__, cost_model.__file__)\n"
    (folder / "train.py").write_text(lines)
    (folder / "mine.py").write_text("")
    for what in (["train.py"], ["-m", "train"]):
        done = subprocess.run(
            python.module("whale", "run", "-np", "1", *what),
            cwd=folder,
            env=python.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"[0] {ROOT}/whale_ops/__init__.py {ROOT}/cost_model/__init__.py\n"


def test_before_python_had_an_option_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0, "final", 0))
    line = python.module("whale", "--version")
    assert "-P" not in line
    done = subprocess.run(line, cwd=folder, env=python.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whale 0.1.0\n"), done.stderr
