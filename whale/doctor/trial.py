"""Tries a run of two processes: it starts, all-reduces, trains one step, and must agree with one process."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from whale import python
from whale.cpu_load import BUSY, LoadMeter, format_load
from whale.doctor.finding import Finding

NAME = "run of two processes"
MODULE = "whale.tools.doctor_step"
LARGEST_DIFFERENCE = 1e-10  # in float64, as everywhere
_USUAL_S = 12.0  # on two idle cores
_END_S = 10.0  # `whale run` needs three seconds at most to end its ranks
_PR_SET_PDEATHSIG = 1


def look(timeout_s: float) -> Finding:
    """Runs the trial; returns a finding about how it went.

    Args:
        timeout_s: time limit in seconds; then the run is ended with all its processes.
    """
    with tempfile.TemporaryDirectory(prefix="whale_doctor_") as folder:
        results = Path(folder, "results.json")
        environment = python.environment() | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        started_s, meter = time.monotonic(), LoadMeter()
        line = python.module("whale", "run", "-np", "2", "--threads", "1", "-m", MODULE, str(results))
        code, output = _run(line, environment, timeout_s)
        seconds, others = time.monotonic() - started_s, meter.measure_others()
        if code is None:
            why = f"the machine is busy ({format_load(others)}): wait, or" if others >= BUSY else "a slow machine:"
            action = f"{why} --timeout {4 * timeout_s:g}; else see where this stops: {_format_retry()}"
            return Finding(
                NAME, "problem", f"not finished after {timeout_s:g} s\n{python.last_lines(output)}".rstrip(), action
            )
        if code != 0 or not results.exists():
            action = f"see the first error above, and all of them with: {_format_retry()}"
            return Finding(
                NAME, "problem", f"failed with exit code {code}\n{python.last_lines(output)}".rstrip(), action
            )
        return _judge(json.loads(results.read_text()), seconds, others)


def _judge(results: dict[str, Any], seconds: float, others: float) -> Finding:
    difference, moved_bytes = results["difference"], results["moved_bytes"]
    text = f"{seconds:.1f} s; weights and loss differ from one process by {difference:.1e} (float64)"
    if moved_bytes == 0 or not difference <= LARGEST_DIFFERENCE:
        text += f", limit {LARGEST_DIFFERENCE:.0e}; {moved_bytes} bytes were exchanged"
        return Finding(
            NAME, "problem", text, "results would be wrong: report this with the output of `whale doctor --json`"
        )
    if others >= BUSY:
        text += f"; the machine is busy: {format_load(others)}"
        return Finding(
            NAME,
            "warning",
            text,
            f"an idle machine takes some {_USUAL_S:g} s: wait until it is idle, or accept slow runs",
        )
    return Finding(NAME, "ok", text)


def _format_retry() -> str:
    return f"{Path(sys.executable).name} -m whale run -np 2 -v -m {MODULE}"


def _run(line: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Runs a command; returns (exit code, output), or (None, output so far) if it did not end in time.

    No process remains, whatever ends this one.
    """
    with _stop_as_exception():
        process = subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, _end(process)
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[str]) -> str:
    """Ends `whale run`, which ends its ranks; returns the output that had not been read."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            return process.communicate(timeout=_END_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def _end_with_parent() -> None:
    """Asks the kernel to send SIGTERM to `whale run` when this process dies, even by SIGKILL; runs in the child
    before exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _stop_as_exception() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit while inside, so that child processes are ended by `finally` blocks."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
