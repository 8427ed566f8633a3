"""The builder of Horovod, without building it: what it changes in the sources, what it says when a tool is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.errors import CommError
from whale_ops import build_horovod

_LIST = """# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

"""


def _sources(folder: Path, text: str) -> Path:
    path = folder / "horovod/tensorflow/CMakeLists.txt"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_only_the_xla_ops_are_left_out(tmp_path: Path) -> None:
    path = _sources(tmp_path, _LIST)
    build_horovod.leave_out_xla(tmp_path)
    assert path.read_text() == _LIST.replace(_LIST.splitlines()[2] + "\n", "")


def test_other_sources_are_refused(tmp_path: Path) -> None:
    _sources(tmp_path, "project(something)\n")
    with pytest.raises(CommError, match="not those expected"):
        build_horovod.leave_out_xla(tmp_path)


def test_missing_packages_are_named_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "_NEEDED", {"no_such_module_of_anybody": "some-package"})
    with pytest.raises(CommError) as caught:
        build_horovod.build()
    assert "-m pip install some-package" in str(caught.value)


@pytest.mark.parametrize(("version", "fits"), [("3.12.4", False), ("3.13.0", True), ("3.31.6", True), ("4.0.1", False)])
def test_the_version_of_cmake(version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\necho cmake version {version}\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(build_horovod.sys, "executable", str(tmp_path / "python"))
    if fits:
        assert build_horovod._find_cmake() == str(cmake)
    else:
        with pytest.raises(CommError, match=f"CMake {version.rpartition('.')[0]}"):
            build_horovod._find_cmake()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "_NEEDED", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CommError, match="no C\\+\\+ compiler"):
        build_horovod.build()


def test_a_stage_that_fails_shows_its_first_error() -> None:
    script = "echo one; echo 'file.cc:3: error: no such thing'; echo two; exit 3"
    with pytest.raises(CommError) as caught:
        build_horovod._run(["sh", "-c", script], "Horovod does not compile")
    assert "exit code 3" in str(caught.value)
    assert "file.cc:3: error: no such thing" in str(caught.value)
