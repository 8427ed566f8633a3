"""``python -m tests.gpu_first``: a line for each part, also for one that fails or has nothing to run with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests import gpu_first


def test_parts_run_with_the_host_as_gpu() -> None:
    """Runs, of the parts that take ranks, the one with a killed peer; the others are those of test_cuda.py."""
    command = [sys.executable, "-m", "tests.gpu_first", "--host", "kernels against", "killed"]
    done = subprocess.run(command, cwd=gpu_first.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    peers = ["cuda-ipc, the peer is killed", "nccl, the peer is killed"]
    assert said == ["Python", "GPUs", "device code by NVRTC", "kernels against NumPy", *peers]
    assert "156 results: all right" in done.stdout and "cannot run" not in done.stdout
    assert "the ranks could not meet" in done.stdout


def test_nothing_is_tried_without_a_gpu_or_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(machine: gpu_first.Machine) -> str:
        raise gpu_first.CannotRun("no driver of NVIDIA")

    monkeypatch.setattr(gpu_first, "driver", without)
    monkeypatch.setattr(sys, "argv", ["gpu_first"])
    assert gpu_first.main() == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["Python", "GPUs"]
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--minutes", "0", "pinned"])
    assert gpu_first.main() == 0
    assert capsys.readouterr().out.count("left out: 0 minutes are over") == 4


def test_what_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise gpu_first.Failed("element 7 differs")

    def cannot() -> str:
        raise gpu_first.CannotRun("no compute-sanitizer")

    def parts(*_: object) -> Iterator[tuple[str, Callable[[], str]]]:
        yield from {"kernels": fails, "memcheck": cannot, "rates": lambda: "9 GB/s"}.items()

    monkeypatch.setattr(gpu_first, "parts", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_first"])
    assert gpu_first.main() == 1
    lines = capsys.readouterr().out.splitlines()
    for line, outcome in zip(lines, ("FAILED: element 7 differs", "cannot run: no compute-sanitizer", "9 GB/s")):
        assert outcome in line
    monkeypatch.setattr(sys, "argv", ["gpu_first", "rates", "memcheck"])
    assert gpu_first.main() == 0


def test_a_process_that_does_not_end_is_a_part_that_fails(tmp_path: gpu_first.Path) -> None:
    machine = gpu_first.Machine(tmp_path)
    with pytest.raises(gpu_first.Failed, match=r"did not end within 1 s: begun"):
        gpu_first.ran(machine, [sys.executable, "-uc", "import time; print('begun'); time.sleep(60)"], 1.0)
    with pytest.raises(gpu_first.Failed, match="ended with 3: no GPU"):
        gpu_first.ran(machine, [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"], 20.0)
