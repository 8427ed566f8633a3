"""``python -m tests.gpu``: what it says of each part, with and without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cost_model.graph.machine_profile import Curve
from tests import gpu
from whale.tools.profile import profile
from whale.tools.profile.links import Links
from whale_ops import device_library


@pytest.mark.parametrize("gpus", [(), ("NVIDIA Whatever",)], ids=["none", "one"])
def test_every_part_says_what_was_done(
    gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu, "look", lambda: gpu.Machine(Path("lib.so"), "built, NCCL found", gpus))
    monkeypatch.setattr(gpu, "tested", lambda *files: ran.extend(files))
    for measured in ("rates", "exchanges", "steps"):
        monkeypatch.setattr(gpu, measured, lambda machine: "measured")
    assert gpu.main() == 0
    said = dict(line.split(":  ", 1) for line in capsys.readouterr().out.replace(": ", ":  ").splitlines())
    assert len(said) == 11
    for file, _, test in (one.partition("::") for one in ran):
        assert f"def {test}" in (gpu.ROOT / file).read_text()
    waiting = [what for what, outcome in said.items() if gpu.WAITING in outcome]
    assert len(waiting) == (0 if gpus else 5)
    assert sum("fake device" in outcome for outcome in said.values()) == 3
    assert any("test_what_gpus_exchange" in one for one in ran) == bool(gpus)


def test_a_part_that_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tested(*files: str) -> None:
        if "kernels" in files[0]:
            raise gpu.Failed("element 7 differs")

    monkeypatch.setattr(gpu, "look", lambda: gpu.Machine(None, "not built"))
    monkeypatch.setattr(gpu, "tested", tested)
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert "FAILED\nelement 7 differs" in out and out.count(gpu.WAITING) == 5


def test_without_a_compiler_what_takes_one_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(device_library, "PATH", tmp_path / "none.so")
    assert gpu.look().library is None
    library = tmp_path / "libwhale_cuda.so"
    code = "int whale_cuda_devices(int* count) { return 4; }"
    subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(library)], input=code, text=True, check=True)
    monkeypatch.setattr(device_library, "PATH", library)
    monkeypatch.setattr(device_library, "find_nccl", lambda: None)
    monkeypatch.setattr(gpu, "tested", lambda *files: pytest.fail("nothing can be compiled"))
    assert gpu.main() == 0
    out = capsys.readouterr().out
    assert "built, no NCCL" in out and out.count("not tested: no C++ compiler") == 5


def test_exchanges_and_steps_are_added_to_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(gpu.with_table(gpu.PAGE.read_text(), ["| rates |"]))
    monkeypatch.setattr(gpu, "PAGE", page)
    asked: list[list[str]] = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "ResNet50\n\n| model | ms |\n|---|---|\n", "")

    machine = gpu.Machine(None, "compiled", ("NVIDIA Whatever",))
    through = {backend: [Curve("all_gather", 2, [(1e3, 1e-5), (1e6, 1e-3)], backend)] for backend in machine.backends}
    host = Curve("all_gather", 2, [(1e3, 1.0)])

    def links(ranks: int, variables: dict[str, str]) -> Links:
        backend = variables["WHALE_COMMUNICATION_BACKEND"]
        assert ("CUDA_VISIBLE_DEVICES" in variables) == (backend == "cuda-ipc"), "they share a GPU"
        return Links([host, *through[backend]], 0.0)

    monkeypatch.setattr(profile, "measure_links", links)
    assert gpu.exchanges(machine).startswith("measured on 1 NVIDIA")
    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.steps(machine).startswith("measured on 1 NVIDIA")
    text = page.read_text()
    for backend in ("cuda-ipc", "pinned"):
        assert f"| {backend} | 2 ranks, 1 GPU | all_gather | 1000000 | 1000.0 | 0.50 |" in text
    assert text.count("all_gather") == 4
    assert "| rates |" in text and "| model | ms |" in text and "through `cuda-ipc`" in text
    assert "benchmarks.step_time" in asked[0]


def test_the_page_has_a_place_for_the_table() -> None:
    page = gpu.PAGE.read_text()
    once = gpu.with_table(page, ["| a |"])
    assert "| a |" in once and gpu.with_table(once, ["| b |"]) == gpu.with_table(page, ["| b |"])
    kinds = {"all_reduce packed": 1.57, "reduce_scatter": 0.79, "broadcast": 1.05, "point_to_point": 1.05}
    for kind, rate in kinds.items():
        row = gpu._row("nccl", "4 ranks", kind, 4, 1 << 20, 1e-3)
        assert row == f"| nccl | 4 ranks | {kind} | 1048576 | 1000.0 | {rate:.2f} |"
