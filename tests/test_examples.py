"""The examples, in small and on two ranks of this process: each is short, and its loss falls."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import whale as wh
from tests.draws import one_of

FOLDER = Path(__file__).resolve().parents[1] / "examples"
MOST_LINES = 100
SMALL = {
    "arcface.py": "--steps 20 --identities 150",
    "digits.py": "--epochs 2",
    "dlrm.py": "--steps 41 --values 50",
    "gpt.py": "--steps 12 --width 16 --blocks 2",
    "hello.py": "",
    "many_classes.py": "--steps 8 --classes 200 --width 32",
    "moe.py": "--steps 41",
    "restart.py": "--steps 120 --save-every 40 --folder {folder}",
    "serving.py": "--epochs 2 --folder {folder}",
}
# They start processes, train without ranks, or are compared elsewhere: demo.py by hand, the sessions by tests/tf1.
OTHERS = {"demo.py", "digits_tf1.py", "elastic.py", "unequal.py"}
KILLED = "rank 1 was killed by SIGKILL; the run went on without it, to its end"
LOSS = re.compile(r"loss:? (\d+\.\d+)")


def test_every_example_is_short_and_known() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*SMALL, *OTHERS}
    lengths = {path.name: path.read_text().count("\n") for path in FOLDER.glob("*.py")}
    assert {name: count for name, count in lengths.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("name", one_of(3, SMALL))
def test_an_example_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WHALE_COMMUNICATION_IN_PROCESS_RANKS", "2")
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].format(folder=tmp_path / "out").split()])
    try:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        wh.shutdown()
    losses = [float(found) for found in LOSS.findall(capsys.readouterr().out)]
    assert len(losses) >= 2 and losses[-1] < losses[0], losses


@pytest.mark.long
def test_the_elastic_example_goes_on_without_a_rank() -> None:
    line = [sys.executable, "-m", "whale", "run", "-np", "2", str(FOLDER / "elastic.py"), "--epochs", "3"]
    run = subprocess.run([*line, "--kill-at", "70"], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0 and run.stderr.strip().splitlines()[-1].endswith(KILLED), run.stderr
    losses = [float(found) for found in LOSS.findall(run.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0] and "ranks at the end: 1" in run.stdout, run.stdout
