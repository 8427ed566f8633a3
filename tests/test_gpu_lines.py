"""``python -m tests.gpu``: what it says of each part, with and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import gpu


@pytest.mark.parametrize("gpus", [(), ("NVIDIA Whatever",)], ids=["none", "one"])
def test_every_part_says_what_was_done(
    gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu, "look", lambda: gpu.Machine(Path("lib.so"), "compiled by nvcc 1.0, with NCCL", gpus))
    monkeypatch.setattr(gpu, "tested", lambda *files: ran.extend(files))
    monkeypatch.setattr(gpu, "rates", lambda machine: "measured")
    assert gpu.main() == 0
    said = dict(line.split(":  ", 1) for line in capsys.readouterr().out.replace(": ", ":  ").splitlines())
    assert len(said) == 7 and all((gpu.ROOT / file).exists() for file in ran)
    waiting = [what for what, outcome in said.items() if gpu.WAITING in outcome]
    assert len(waiting) == (0 if gpus else 3)
    assert sum("fake device" in outcome for outcome in said.values()) == 2
    assert ("tests/distributed/test_gpu.py" in ran) == bool(gpus)


def test_a_part_that_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tested(*files: str) -> None:
        if "kernels" in files[0]:
            raise gpu.Failed("element 7 differs")

    monkeypatch.setattr(gpu, "look", lambda: gpu.Machine(None, "not compiled: no nvcc"))
    monkeypatch.setattr(gpu, "tested", tested)
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert "FAILED\nelement 7 differs" in out and out.count(gpu.WAITING) == 3


def test_the_page_has_a_place_for_the_table() -> None:
    page = gpu.PAGE.read_text()
    once = gpu.with_table(page, ["| a |"])
    assert "| a |" in once and gpu.with_table(once, ["| b |"]) == gpu.with_table(page, ["| b |"])
    assert gpu._row("nccl", "4 GPUs", 4, 1 << 20, 1e-3) == "| nccl | 4 GPUs | 1048576 | 1000.0 | 1.57 |"
