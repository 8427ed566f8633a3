"""Folders of shared memory that runs of one host make and remove beside each other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from whale.launcher import shm_cleanup


def test_a_folder_made_anew_while_another_run_removes_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, starting = tmp_path / "whale-mine", tmp_path / "whale-starting"
    starting.mkdir()  # of a run that has not held it yet
    opened, real_open = [], os.open

    def removed_by_a_third(path: Any, flags: int, *more: Any, **rest: Any) -> int:
        descriptor = real_open(path, flags, *more, **rest)
        if str(path) == str(starting) and not opened:
            opened.append(descriptor)
            shutil.rmtree(starting)
            shm_cleanup.open_folder(str(starting))
            (starting / "segment").write_text("in use")
        return descriptor

    monkeypatch.setattr(shm_cleanup.os, "open", removed_by_a_third)
    shm_cleanup.open_folder(str(mine))
    assert opened
    assert (starting / "segment").read_text() == "in use"


def test_a_folder_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "whale-left"
    left.mkdir()
    (left / "segment").write_text("of a run that was killed")
    shm_cleanup.open_folder(str(tmp_path / "whale-mine"))
    assert not left.exists()
