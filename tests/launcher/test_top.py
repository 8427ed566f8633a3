"""`whale top`: what the launcher answers of a run that goes on, and how it is shown."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import pytest

from tests.launcher.helpers import MEET, Launcher
from tests.launcher.test_progress import told
from whale.cli import main
from whale.errors import ClusterError
from whale.launcher import top
from whale.launcher.job.status import NAME, RankStatus, RunStatus, StatusSocket
from whale.launcher.protocol import Stall

# Rank 0 has taken three steps and stands in a fourth; rank 1 has called nothing.
STANDING = (
    MEET
    + """
from whale.config import Config
from whale.distributed.watch import LauncherWatch
if rank == 0:
    watch = LauncherWatch(Config())
    watch.look_after(None)
    for _ in range(3):
        watch.progress.count_steps(lambda: None, "train_step")()
    def stand():
        while not os.path.exists("go on"):
            time.sleep(0.01)
    watch.progress.count_steps(stand, "evaluate")()
while not os.path.exists("go on"):
    time.sleep(0.01)
"""
)


def _ask_until(run: top.Run, is_there: Callable[[RunStatus], bool]) -> RunStatus:
    """Asks until the status is as wanted; the test's own limit ends it otherwise."""
    while True:
        status = top.ask_status(run)
        assert status is not None
        if is_there(status):
            return status
        time.sleep(0.02)


def test_a_run_tells_what_its_ranks_do(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # whatever the length of the folder's path
    with launcher.start("-np", "2", launcher.script(STANDING), "--epochs", "3") as process:
        while not (runs := [run for run in top.list_runs() if run.process == process.pid]):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        (run,) = runs
        status = _ask_until(
            run, lambda status: status.ranks[0].latest is not None and status.ranks[0].latest["doing"] is not None
        )
        assert main(["top", "--once", str(process.pid)]) == 0
        (launcher.folder / "go on").touch()
        while top.ask_status(run) is not None:
            time.sleep(0.02)
        assert process.wait() == 0
    first, second = status.ranks
    assert first.latest is not None and first.latest["programs"]["train_step"][0] == 3
    assert first.latest["doing"] is not None and first.latest["doing"][0] == "evaluate"
    assert first.latest["memory_bytes"] > 1 << 20 and first.host == socket.gethostname()
    assert second.state in ("running without wh.init", "starting") and second.latest is None
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"whale run {process.pid}: {status.command}" and shown[0].endswith("script.py --epochs 3")
    assert shown[1].startswith("2 ranks, up ") and shown[-2].split()[2] == "3" and "in evaluate" in shown[-2]
    with pytest.raises(ClusterError, match="no run of this process number"):
        top.choose_run(process.pid)


def _rank(
    rank: int, calls: int, step_s: float, waiting_s: float, wait: Stall | None = None, told_s: float = 0.5
) -> RankStatus:
    before = told(10, 1.0) | {"waiting_s": 0.0}
    latest = told(10 + calls, 1.0 + calls * step_s, sent=calls * 2048) | {"waiting_s": calls * waiting_s, "wait": wait}
    return RankStatus(rank, f"node{rank}.example", "running", told_s, latest, before)


def test_a_run_is_shown_in_80_columns() -> None:
    wait = Stall(what="AllReduce 'dense/kernel'", seconds=12.4, missing=[1])
    ranks = [
        _rank(0, 8, 0.0625, 0.025),
        _rank(1, 8, 0.0625, 0.001, told_s=13.0),
        _rank(2, 8, 0.0625, 0.027, wait),
        RankStatus(3, "node3", "stopped"),
    ]
    lines = top.format_status(RunStatus(42, "train.py --epochs 3", 3725.0, 1, ranks), 80)
    assert lines == [
        "whale run 42: train.py --epochs 3",
        "4 ranks, up 1 h 2 min, started again once",
        "step: 62.5 ms a step, 18 steps, 2.0 KiB sent in each",
        "the others wait 26.0 ms a step, most of it for rank 1",
        "",
        "rank  host             steps   ms/step  waits ms     MiB  now",
        "   0  node0.exampl        18      62.5      25.0       3  between steps",
        "   1  node1.exampl        18      62.5       1.0       3  between steps for 13 s",
        "   2  node2.exampl        18      62.5      27.0       3  waits 12 s for rank 1",
        "                                                          in AllReduce",
        "                                                          'dense/kernel'",
        "   3  node3                                               stopped",
    ]
    wide = top.format_status(RunStatus(42, "train.py", 59.0, 0, ranks), 120, height=8)
    assert wide[-1] == "and 4 more ranks: make the window higher" and len(wide) == 7
    assert top.describe_now(ranks[2]) == "waits 12 s for rank 1 in AllReduce 'dense/kernel'"


def test_figures_are_of_the_steps_between_two_messages() -> None:
    assert top.compute_rates(None, None) is None
    since_start = top.compute_rates(told(4, 1.0, sent=4096), None)
    assert since_start == top.Rates("step", 4, 0.25, 0.125, 1024.0)
    again = top.compute_rates(told(4, 1.0), told(9, 9.0, begun_ns=2))  # what another process told before
    assert again is not None and (again.steps, again.step_s) == (4, 0.25)


def test_others_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    status = StatusSocket()
    try:
        (run,) = [run for run in top.list_runs() if run.process == os.getpid()]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect("\0" + run.name[1:])
            monkeypatch.setattr("whale.launcher.job.status.find_peer", lambda connection: (1, os.getuid() + 1))
            status.answer(lambda: pytest.fail("it is made for nobody"))
            assert connection.recv(1) == b""
        status.answer(lambda: pytest.fail("nobody has connected"))
    finally:
        status.close()


def test_a_name_that_another_user_has_taken_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    status = StatusSocket()
    try:
        (run,) = [run for run in top.list_runs() if run.process == os.getpid()]
        other = top.Run(run.process, run.user + 1, run.name)
        assert NAME.format(user=run.user, process=run.process) in run.name
        assert top.ask_status(other) is None
        monkeypatch.setattr(top, "list_runs", list)
        with pytest.raises(ClusterError, match="no run that `whale run` has started is running"):
            top.choose_run(None)
        monkeypatch.setattr(top, "list_runs", lambda: [run, top.Run(1, run.user, "@gone")])
        monkeypatch.setattr(top, "ask_status", lambda run: None)
        with pytest.raises(ClusterError, match="several runs are running on this host"):
            top.choose_run(None)
    finally:
        status.close()
