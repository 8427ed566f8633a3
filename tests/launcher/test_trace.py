"""`whale run --trace`: one file of all ranks in one time, whatever happens to them; `-v`: what they communicated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launcher.helpers import MEET, Launcher
from tests.launcher.test_hosts import OTHER, with_ssh
from tests.traces import only, pieces
from whale.launcher.connection import Clock
from whale.launcher.job.counters import format_tables
from whale.launcher.job.ranks import RankLink
from whale.launcher.job.trace import TraceFile
from whale.launcher.protocol import FrameKind

# What wh.init does for the trace, without TensorFlow.
TRACED = (
    MEET
    + """
from whale.started import process_place
from whale.config import Config
from whale.distributed.trace import open_trace
trace = open_trace(Config(), process_place(), (rank,), 1)
"""
)


def test_a_killed_rank_leaves_what_it_did(launcher: Launcher) -> None:
    script = launcher.script(
        TRACED
        + """
with trace.open_span("done", "step", number=0):
    pass
with trace.open_span("under way", "step"):
    meet("a")
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
    )
    done = launcher.run("-np", "2", "--trace", "out.json", script)
    assert done.returncode == 137
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 was killed by SIGKILL"
    assert "events of the trace are in out.json" in done.stderr
    events = json.loads((launcher.folder / "out.json").read_text())
    for rank in range(2):
        found = pieces(events, rank)
        step, unfinished = only(found, "done"), only(found, "under way")
        assert step.arguments == {"number": 0} and 0 < step.start <= step.end <= unfinished.start
        assert unfinished.end is None
    killed = only(pieces(events, 1), "rank 1 was killed by SIGKILL")
    assert killed.start > only(pieces(events, 1), "under way").start


def test_restarts_go_on_in_the_same_file(launcher: Launcher) -> None:
    script = launcher.script(
        TRACED
        + """
from whale.started import restarts
with trace.open_span(f"attempt {restarts()}", "step"):
    pass
sys.exit(7 if restarts() == 0 else 0)
"""
    )
    done = launcher.run("-np", "1", "--max-restarts", "1", "--trace", "out.json", script)
    assert done.returncode == 0, done.stderr
    found = pieces(json.loads((launcher.folder / "out.json").read_text()), 0)
    names = ["attempt 0", "rank 0 failed: exit code 7", "attempt 1"]
    assert [piece.name for piece in found if piece.name in names] == names


def test_a_host_with_another_clock(launcher: Launcher) -> None:
    """The other host's monotonic clock is 1000 s ahead; its events stand where they happened."""
    shifted = ["unshare", "--time", "--monotonic", "1000", "--fork"]
    if subprocess.run([*shifted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system makes no time namespaces for this user")
    with_ssh(launcher)
    agent = launcher.folder / "ssh"
    agent.write_text(agent.read_text().replace("exec env", f"exec {' '.join(shifted)} env"))
    script = launcher.script(
        TRACED
        + """
meet("a")
with trace.open_span("between", "step"):
    meet("b")
    time.sleep(1.0)
    meet("c")
"""
    )
    done = launcher.run("-np", "2", "--hosts", f"localhost:1,{OTHER}:1", "--trace", "out.json", script)
    assert done.returncode == 0, done.stderr
    events = json.loads((launcher.folder / "out.json").read_text())
    here, there = (only(pieces(events, rank), "between") for rank in range(2))
    assert here.end is not None and there.end is not None
    # Both were between their meetings for 1 s at least, at the same time. How exactly the other host's time is known
    # depends on how soon the two hear each other: within 0.1 s even on a busy machine.
    assert min(here.end, there.end) - max(here.start, there.start) >= 0.9e6


@pytest.mark.parametrize("path", ["missing/out.json", "."])
def test_a_path_that_cannot_be_written_is_refused(launcher: Launcher, path: str) -> None:
    done = launcher.run("-np", "1", "--trace", path, launcher.script("print('started')"))
    assert done.returncode == 2 and done.stdout == ""
    assert f"the result cannot be written there\n  given: --trace {path}\n" in done.stderr and "next:" in done.stderr


def test_a_trace_asked_for_twice_is_refused(launcher: Launcher) -> None:
    launcher.environment["WHALE_DEBUG_TRACE"] = "own.json"
    done = launcher.run("-np", "1", "--trace", "out.json", launcher.script(TRACED))
    assert done.returncode == 1 and "two traces are asked for" in done.stderr
    assert not list(launcher.folder.glob("own*"))


def test_the_answer_with_the_shortest_way_tells_the_offset() -> None:
    clock = Clock()
    assert clock.offset_ns is None and not clock.is_known
    clock.add(asked_ns=0, received_ns=5_000 + 90, answered_ns=5_000 + 100, heard_ns=110)  # 90 there, 10 back
    assert clock.offset_ns == 5_000 + 40
    clock.add(asked_ns=1000, received_ns=5_000 + 1004, answered_ns=5_000 + 1500, heard_ns=1506)  # 4 there, 6 back
    assert clock.offset_ns == 5_000 - 1
    for i in range(8):  # by now it runs ahead, and older answers do not count
        clock.add(
            asked_ns=2000 * i,
            received_ns=2000 * i + 7_000 + 20,
            answered_ns=2000 * i + 7_000 + 20,
            heard_ns=2000 * i + 40,
        )
    assert clock.offset_ns == 7_000 and clock.is_known
    assert Clock(is_ours=True).offset_ns == 0


def test_events_wait_for_the_clock_and_need_not_come_as_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    trace, link = TraceFile(str(path)), RankLink(connection=None)  # type: ignore[arg-type]
    link.clock._samples.extend([(1, 10**15)] * 8)
    late = RankLink(connection=None, clock=Clock())  # type: ignore[arg-type]
    line = b'{"name":"a","ph":"i","ts":%d.5,"pid":0},\n' % (10**12 + 10**9)
    trace.take(late, FrameKind.TRACE, line)
    for piece in (line[:20], line[20:] + b"no event\n" + line[:5], line[5:]):
        trace.take(link, FrameKind.TRACE, piece)
    trace.end([link])
    assert "1 could not be read" in trace.format_summary() and trace.format_summary().startswith("2 events")
    assert len(json.loads(path.read_text() + "]")) == 2  # as a viewer sees it while the run goes on
    late.clock.add(0, 0, 0, 0)
    trace.take(late, FrameKind.TRACE, b"")
    trace.end([late])  # one answer has to do
    trace.close()
    first, second, third = json.loads(path.read_text())
    assert first == second and third["ts"] - first["ts"] == pytest.approx(1e12, rel=1e-9)


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    trace = TraceFile("/dev/full")
    trace.mark(0, "anything")
    trace.close()
    assert "then it could not be written: [Errno 28]" in trace.format_summary()


def test_the_counters_are_added_up() -> None:
    def counter(key: str, kind: str, seconds: float, waiting: float) -> dict:
        sizes = {"logical_bytes": 3 << 19, "wire_bytes": 2 << 20}
        return {"key": key, "kind": kind, "calls": 3, **sizes, "seconds": seconds, "waiting_seconds": waiting}

    known = {
        0: [counter("g", "AllReduce", 3.0, 1.0), *(counter(f"k{i}", "Send", 0.1, 0.1) for i in range(12))],
        2: [counter("g", "AllReduce", 4.0, 0.5)],
    }
    text = format_tables(known, size=3, width=100)
    rows = [line.split() for line in text.splitlines()]
    assert "nothing is known of ranks [1]" in text and "the 10 of 13 keys" in text
    assert ["AllReduce", "6", "3.000", "4.000", "1.500", "5.500", "2:", "4.000"] in rows
    assert ["AllReduce", "g", "6", "3.000", "4.000", "1.500", "5.500", "2:", "4.000"] in rows
    assert ["Send", "36", "18.000", "24.000", "1.200", "0.000", "0:", "1.200"] in rows
    assert rows[-2:] == [
        ["2", "3", "1.500", "2.000", "0.500", "3.500"],
        ["0", "39", "19.500", "26.000", "2.200", "2.000"],
    ]
