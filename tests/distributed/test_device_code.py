"""Machine code of kernels for GPUs: compiled once, kept for later runs, and never read where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.distributed import device_exchange
from whale.errors import CommError
from whale_ops import device_code as compiler
from whale_ops import device_library

NVRTC = compiler.Nvrtc("libnvrtc.so.12", (12, 9), (70, 80, 90))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Architectures that were compiled for, in order."""
    asked: list[int] = []

    def compile_kernels(nvrtc: compiler.Nvrtc, architecture: int) -> bytes:
        asked.append(architecture)
        return f"code {len(asked)}".encode()

    monkeypatch.setattr(compiler, "compile_kernels", compile_kernels)
    return asked


def test_kernels_are_compiled_once_for_each_kind_of_gpu(compiled: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert device_exchange.load_code(NVRTC, 80, folder) == device_exchange.load_code(NVRTC, 80, folder) == b"code 1"
    assert device_exchange.load_code(NVRTC, 86, folder) == b"code 1", "the same machine code runs there"
    assert device_exchange.load_code(NVRTC, 90, folder) == b"code 2"
    newer = compiler.Nvrtc("libnvrtc.so.13", (13, 0), (80,))
    assert device_exchange.load_code(newer, 80, folder) == b"code 3"
    assert compiled == [80, 90, 80]


def test_other_sources_are_compiled_anew(compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_exchange.load_code(NVRTC, 80, tmp_path / "kept")
    other = tmp_path / "kernels.cu"
    other.write_text(compiler.SOURCE.read_text() + "\n")
    monkeypatch.setattr(compiler, "SOURCE", other)
    device_exchange.load_code(NVRTC, 80, tmp_path / "kept")
    assert compiled == [80, 80]


def test_what_is_damaged_is_compiled_anew(
    compiled: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    device_exchange.load_code(NVRTC, 90, folder)
    (kept,) = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert device_exchange.load_code(NVRTC, 90, folder) == b"code 2"
    assert device_exchange.load_code(NVRTC, 90, folder) == b"code 2"
    assert [path.name for path in folder.iterdir()] == [kept.name]


def test_where_nothing_can_be_kept_a_run_compiles(compiled: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o755)  # open to others
    assert device_exchange.load_code(NVRTC, 90, folder) == b"code 1"
    assert device_exchange.load_code(NVRTC, 90, None) == b"code 2"
    assert not [*folder.iterdir()]


def test_what_a_gpu_lacks_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_library, "find_architecture", lambda library, ordinal: 90)
    monkeypatch.setattr(compiler, "find_nvrtcs", lambda: iter(()))
    said = device_exchange.find_missing(tmp_path / "lib.so", "cuda-ipc", 0, None)
    assert "no compiler for the kernels" in said and "pip install" in said and "\n" not in said
    assert device_exchange.find_missing(tmp_path / "lib.so", "pinned", 0, None) == "", "it only copies"
    monkeypatch.setattr(device_library, "find_nccl", lambda: None)
    assert "pip install nvidia-nccl-cu12" in device_exchange.find_missing(tmp_path / "lib.so", "nccl", 0, None)


def test_a_library_that_does_not_load_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=r"python -m whale_ops\.build"):
        device_library.find_architecture(tmp_path / "none.so", 0)
