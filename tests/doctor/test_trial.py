"""The run of `whale doctor`: it agrees with one process, sees what is wrong, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.helpers import MARKER, PATIENCE_S, ROOT, Launcher
from whale.doctor import trial


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Whose mark the trial's processes carry, and whose folder they find modules in."""
    launcher = Launcher(tmp_path)
    monkeypatch.setenv(MARKER, launcher.mark)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return launcher


@pytest.mark.core
def test_the_whole_command(launcher: Launcher) -> None:
    line = [sys.executable, "-m", "whale", "doctor", "--json", "--timeout", "500"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = said["findings"][-1]
    assert last["name"] == trial.NAME and last["status"] in ("ok", "warning")  # a warning: the machine is busy
    assert launcher.left_behind() == []


def test_a_run_on_a_busy_machine_is_no_good_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"difference": 0.0, "moved_bytes": 9}
    assert trial._judge(good, 9.0, 0.1).status == "ok"
    found = trial._judge(good, 90.0, 0.8)
    assert found.status == "warning" and "the machine is busy: other programs take 80%" in found.text
    monkeypatch.setattr(trial, "_run", lambda *_: (None, ""))
    monkeypatch.setattr(trial.LoadMeter, "measure_others", lambda meter: 0.8)
    assert "the machine is busy (other programs take 80%" in (trial.look(1.0).action or "")


def test_a_rank_that_fails(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.script("import os\nif os.environ['WHALE_RANK'] == '1': raise RuntimeError('no network')", "failing.py")
    monkeypatch.setattr(trial, "MODULE", "failing")
    found = trial.look(300.0)
    assert found.status == "problem" and "RuntimeError: no network" in found.text and "-v" in (found.action or "")
    assert launcher.left_behind() == []


@pytest.mark.parametrize(
    "results", [{"difference": 1e-3, "moved_bytes": 9}, {"difference": float("nan"), "moved_bytes": 9}]
)
def test_results_that_differ(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, results: dict[str, float]) -> None:
    text = f"import json, sys\nopen(sys.argv[1], 'w').write({json.dumps(results)!r})"
    launcher.script(text, "differing.py")
    monkeypatch.setattr(trial, "MODULE", "differing")
    found = trial.look(300.0)
    assert found.status == "problem" and "results would be wrong" in (found.action or "")


def test_ranks_that_exchange_nothing(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """import sys\nopen(sys.argv[1], 'w').write('{"difference": 0.0, "moved_bytes": 0}')"""
    launcher.script(text, "silent.py")
    monkeypatch.setattr(trial, "MODULE", "silent")
    assert trial.look(300.0).status == "problem"


STUCK = "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(600)"


def test_a_run_that_hangs_is_ended(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.script(STUCK, "stuck.py")
    monkeypatch.setattr(trial, "MODULE", "stuck")
    found = trial.look(4.0)
    assert found.status == "problem" and "not finished after 4 s" in found.text
    assert launcher.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_itself_is_ended(launcher: Launcher, number: signal.Signals) -> None:
    launcher.script(STUCK + "\n", "stuck.py")
    # Tests that run in the background inherit that SIGINT is ignored; a person's shell does not do that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from whale.doctor import trial; trial.MODULE = 'stuck'; trial.look(600.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + PATIENCE_S
    while sum("worker" in line for line in launcher.left_behind(within_s=0.0)) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.1)  # two workers and two scripts
    process.send_signal(number)
    process.wait(timeout=PATIENCE_S)
    assert launcher.left_behind() == []
