"""Python that AutoGraph writes goes with the run."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.autograph.pyct import loader

from whale.runtime import start
from whale.runtime.start import keep_sources_with_run
from whale.started import FILES_VARIABLE


def first(x: float) -> float:
    return x + 1.0 if x > 0 else x


def second(x: float) -> float:
    return x + 1.0 if x > 0 else x


def third(x: float) -> float:
    return x + 1.0 if x > 0 else x


def file_of(function: Callable[[float], float]) -> Path:
    """The file in which AutoGraph writes a function that it has not converted before."""
    found = tf.autograph.to_graph(function)
    assert found(1.0) == 2.0
    return Path(inspect.getfile(found))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "tempfile", tempfile)


def test_files_lie_in_the_folder_of_the_run(tmp_path: Path) -> None:
    keep_sources_with_run({FILES_VARIABLE: str(tmp_path)})
    assert file_of(first).parent == tmp_path / "python"


def test_without_a_run_or_memory_they_lie_where_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_sources_with_run({})
    assert file_of(second).parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(start, "_FREE_BYTES", 1 << 80)
    keep_sources_with_run({FILES_VARIABLE: str(tmp_path)})
    assert file_of(third).parent == Path(tempfile.gettempdir())
