"""Keeps what the launcher knows about each rank, and describes how ranks fail.

Decision: 0161.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale.launcher.connection import Clock, find_unacknowledged_s, read_identity
from whale.launcher.protocol import (
    CONSEQUENCE,
    HELLO_LIMIT_BYTES,
    Counter,
    ExitStatus,
    FrameKind,
    Hello,
    MemoryKill,
    RaisedReport,
    RankEnd,
    ScriptMessage,
    Stall,
    Unpacker,
    pack,
    unpack,
)
from whale.started import CONTROL_VARIABLE

# A worker that was not heard for _ASKS_S is asked as often. Where its host has acknowledged something in the last
# _REACHED_S, it has _RESUMES_S more than fault.freeze_s: TCP sends a lost heartbeat again a second later at most.
_ASKS_S, _REACHED_S, _RESUMES_S = 1.0, 1.5, 1.5


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank, or of mpirun.

    Attributes:
        rank: which one; None when it is mpirun that failed.
        code: exit code for the whole run.
        reason: what happened, as the end of a sentence that starts with "rank 1", or with "mpirun".
        error_type: name of the Python exception, or "".
        traceback: text to show, or "".
        signal: the signal that killed the rank, or 0.
        gone: whether its process has been taken away, and the script itself did nothing wrong.
        wanted: whether the run was asked to go on with fewer ranks.
    """

    rank: int | None
    code: int
    reason: str
    error_type: str = ""
    traceback: str = ""
    signal: int = 0
    gone: bool = False
    wanted: bool = False

    @property
    def subject(self) -> str:
        """Returns the subject of a sentence about the failure: "mpirun", or "rank 1"."""
        return "mpirun" if self.rank is None else f"rank {self.rank}"

    @property
    def is_exit_by_script(self) -> bool:
        """Tells whether the script has ended with that code itself, as by sys.exit."""
        return not (self.error_type or self.signal)

    @property
    def is_consequence(self) -> bool:
        """Tells whether this failure only says that another rank is gone."""
        return self.error_type == CONSEQUENCE


def make_raised_failure(rank: int, report: RaisedReport) -> Failure:
    """Returns the failure that a worker's FAILURE frame describes."""
    code, kind = report.code, report.type
    if not kind:
        return Failure(rank, code, f"failed: exit code {code}")
    first_line = report.message.strip().partition("\n")[0]
    if first_line == "in user code:":  # of AutoGraph, before where it was; what it is stands last
        first_line = report.message.strip().rpartition("\n")[2].strip().removeprefix(f"{kind}: ")
    what = f"{kind}: {first_line}" if first_line else kind
    return Failure(rank, code, f"failed: {what} (exit code {code})", kind, report.traceback)


def make_exit_failure(rank: int, host: str, status: ExitStatus) -> Failure | None:
    """Returns the failure that a worker's EXIT frame describes, or None for exit code 0."""
    if status.signal:
        how = f"was killed by {signal_name(status.signal)}"
        if status.memory is not None:
            how = _describe_memory_kill(host, status.memory)
        elif status.told:
            how += f", after mpirun on {host}, or the rank's worker, had been told to end by {signal_name(status.told)}"
        return Failure(rank, status.code, how, signal=status.signal, gone=True)
    if status.code:
        return Failure(rank, status.code, f"failed: exit code {status.code}")
    return None


def make_told_failure(rank: int, number: int) -> Failure:
    """Returns the failure of a run whose mpirun ends its ranks, of which this is the first one."""
    how = f"was told to end by {signal_name(number)}, or the worker of rank {rank} was"
    return Failure(None, 128 + number, how)


def _describe_memory_kill(host: str, kill: MemoryKill) -> str:
    """Describes why the kernel has killed a rank, as the end of a sentence that starts with "rank 1"."""
    held = f"its process held up to {kill.held_bytes / 2**20:.0f} MiB"
    where = (
        f"{host} was out of memory"
        if kill.limit_bytes is None
        else f"{host} limits the memory of its control group to {kill.limit_bytes / 2**20:.0f} MiB"
    )
    return f"was killed by the kernel (SIGKILL), since {where}; {held}: raise the limit, or give the host fewer ranks"


def make_lost_failure(rank: int, host: str) -> Failure:
    """Returns the failure of a rank whose worker is gone without a word."""
    what = f"was lost: its connection from {host} broke, the process was killed or the host is gone"
    return Failure(rank, 1, what, gone=True)


def make_unreadable_failure(rank: int, host: str, why: object) -> Failure:
    """Returns the failure of a rank whose worker sends what no worker sends."""
    return Failure(rank, 1, f"was lost: what came over its connection from {host} is no message of a worker: {why}")


def make_stopped_failure(rank: int, seconds: float) -> Failure:
    """Returns the failure of a rank whose process was stopped, as by SIGSTOP, and did not go on."""
    return Failure(rank, 1, f"is frozen: its process has been stopped for {seconds:.1f} s", gone=True)


def make_closed_failure(rank: int) -> Failure:
    """Returns the failure of a rank whose script has closed what belongs to Whale and to MPI."""
    return Failure(rank, 1, "cannot be reached: its script goes on, and has closed descriptors that it has not opened")


def make_stopped_mpirun_failure(seconds: float) -> Failure:
    """Returns the failure of a run whose mpirun was stopped, as by SIGSTOP: none of its ranks could end."""
    return Failure(None, 1, f"is frozen: its process has been stopped for {seconds:.1f} s")


def make_gone_mpirun_failure(code: int) -> Failure:
    """Returns the failure of a run whose mpirun has ended before the ranks; the code is as `subprocess` has it."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"has ended with code {code} before the ranks"
    return Failure(None, 1, how)


def make_lost_with_mpirun_failure(rank: int, host: str, mpirun: Failure) -> Failure:
    """Returns the failure of a rank whose host's mpirun is gone, or stopped."""
    return Failure(rank, 1, f"was lost: the mpirun of {host} {mpirun.reason}", gone=True)


def make_silent_failure(rank: int, host: str, seconds: float) -> Failure:
    """Returns the failure of a rank whose worker does not answer."""
    return Failure(rank, 1, f"is frozen: nothing was heard from {host} for {seconds:.1f} s", gone=True)


def make_absent_failure(rank: int, waiting: int, called: bool) -> Failure:
    """Returns the failure of a rank whose script ended well but alone, while the others wait for it at their start."""
    where = "inside wh.init" if called else "without calling wh.init"
    reason = f"has ended {where}, in which rank {waiting} waits for it"
    return Failure(rank, 1, reason)


def kill_group(pid: int, token: str) -> None:
    """Kills a script and its children on this host: the process group of that number, if it is one of this run.

    The script itself may have ended already, and its number may be another's by now. What the worker started still has
    the token in its first environment, and what the script started has the number in its own.
    """
    marks = token.encode(), f"{CONTROL_VARIABLE}={pid}:".encode()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and os.getpgid(int(folder.name)) == pid:
                environment = (folder / "environ").read_bytes()
                if any(mark in environment for mark in marks):
                    os.killpg(pid, signal.SIGKILL)
                    return
        except OSError:
            continue  # it ended while we looked


def _read_stat(pid: int) -> list[str]:
    """Returns the fields of a process of this host from /proc (state, parent and so on); [] if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_parent(pid: int) -> int:
    """Returns the parent of a process of this host; 0 if it has ended."""
    return int(found[1]) if (found := _read_stat(pid)) else 0


def _read_state(pid: int) -> str:
    return found[0] if (found := _read_stat(pid)) else ""


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_cause(failures: list[Failure]) -> Failure:
    """Returns the failure that the others follow from: the first that is no consequence, else the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


@dataclass(slots=True)
class RankLink:
    """The connection to one worker, and what it has reported.

    Attributes:
        rank: known after the greeting.
        pid: the script's process on its host.
        raised: its script has reported how it failed; the exit code that follows is no news.
        exited: its script has ended, or the worker is lost.
        hidden: what the rank wrote to stderr after another rank's failure.
        code: of the script's end, once it is known.
        heard_s: when the worker was heard last; monotonic clock of this process, as all times here.
        stopped_s: since when the script's process is stopped, or None.
        freeze_s: for how long it may be; 0 for as long as it likes.
        notice_s: how long its script has to save once it is told to end; 0 where it saves nothing then.
        elastic: its script goes on when other ranks are gone.
        members: the ranks that the run was of when it last went on with others than before, as the script has them.
        address: where others reach it that were not started with it, or "".
        start: what all ranks of the run have begun with, where this one says it; or "".
        joining: its script is in wh.init, waiting for the others; None before, False after.
        clock: how much its host's clock is ahead of this one; known after the greeting.
        trace: what has come of it and is not yet in the launcher's.
        counters: what its script has communicated, once it is known.
        end: how its run of Whale ended: what it trained alone, what its variables hold.
        stall: the latest report of a wait: what for, for how long, for which ranks.
    """

    connection: socket.socket
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(first_bytes=HELLO_LIMIT_BYTES))
    rank: int | None = None
    host: str = ""
    raised: bool = False
    exited: bool = False
    hidden: bytearray = field(default_factory=bytearray)
    code: int | None = None
    pid: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    stopped_s: float | None = None
    freeze_s: float = 0.0
    notice_s: float = 0.0
    elastic: bool = False
    members: Sequence[int] = ()
    address: str = ""
    start: str = ""
    joining: bool | None = None
    stall: Stall | None = None
    trace: bytearray = field(default_factory=bytearray)
    clock: Clock = field(default_factory=Clock)
    counters: list[Counter] | None = None
    end: RankEnd | None = None
    _asked_s: float = -math.inf  # when a silent worker was last asked for a sign of life
    _silent_s: float = math.inf  # since when it is taken for frozen, unless a second look finds otherwise

    def greet(self, kind: FrameKind, payload: bytes, size: int, comes: Callable[[int], bool] | None) -> int | None:
        """Handles the first frame; returns the rank, or None when it does not come from a worker of this run.

        ``comes``: whether a rank of this number was started while the run goes on.
        """
        try:
            hello = unpack(payload, Hello)
        except ValueError:
            return None
        of_start = hello.size == size and 0 <= hello.rank < size
        if kind is not FrameKind.HELLO or not (of_start or (comes is not None and comes(hello.rank))):
            return None
        self.rank, self.host, self.pid = hello.rank, hello.host, hello.pid
        self.clock = Clock(is_ours=bool(hello.clock) and hello.clock == read_identity())
        return self.rank

    def send_signal(self, number: int) -> None:
        """Asks the worker to send a signal to its script; does nothing if the worker is gone."""
        self._send(FrameKind.SIGNAL, {"signal": int(number)})

    def tell_lost(self, rank: int | None, what: str, goes_on: bool = False) -> None:
        """Tells the script that another rank, or mpirun (None), is gone; ``what`` ends a sentence about it.

        ``goes_on``: the run does so without that rank.
        """
        self.tell({"rank": rank, "what": what, "goes_on": goes_on})

    def tell_start(self, start: str, history: Sequence[dict[str, Any]]) -> None:
        """Tells the script of a joining rank what the others have begun with, and who is gone and has come since."""
        self.tell({"rank": None, "start": start, "history": list(history)})

    def tell(self, message: dict[str, Any]) -> None:
        """Tells the script something, in the form that whale/distributed/watch.py reads."""
        self._send(FrameKind.LOST, message)

    def take(self, message: ScriptMessage) -> None:
        """Keeps what the script says of itself."""
        for name in ("joining", "freeze_s", "notice_s", "elastic", "members", "address", "start"):
            if (said := getattr(message, name)) is not None:
                setattr(self, name, said)
        self.end = message.end or self.end
        self.counters = message.counters or self.counters

    def ask_clock(self) -> None:
        """Asks the worker for its time."""
        self.clock.asked_ns = time.monotonic_ns()
        self._send(FrameKind.CLOCK, {"asked_ns": self.clock.asked_ns})

    def find_freeze(self, now_s: float, silence_s: float) -> Failure | None:
        """Returns a failure if this rank's process is stopped, or its worker silent, for longer than it may be."""
        if self.rank is None or self.exited or not self.freeze_s:
            return None
        if self.stopped_s is not None and now_s - self.stopped_s >= self.freeze_s:
            return make_stopped_failure(self.rank, now_s - self.stopped_s)
        quiet_s, most_s = now_s - self.heard_s, max(self.freeze_s, silence_s)
        if quiet_s >= _ASKS_S and now_s - self._asked_s >= _ASKS_S:
            self._asked_s = now_s
            self.ask_clock()  # so that its host has something to acknowledge
        if quiet_s < most_s or self._is_starved() or (quiet_s < most_s + _RESUMES_S and self._is_reached()):
            self._silent_s = math.inf
            return None
        # A second look: what its worker has sent meanwhile may be on the way, and its process asleep again.
        self._silent_s = min(self._silent_s, now_s)
        return (
            make_silent_failure(self.rank, self.host, now_s - self.heard_s)
            if now_s - self._silent_s >= silence_s / 8
            else None
        )

    def _is_reached(self) -> bool:
        """Tells whether another host acknowledges again: what was lost in a cut is sent once more within moments."""
        return self.host != socket.gethostname() and find_unacknowledged_s(self.connection) < _REACHED_S

    def _is_starved(self) -> bool:
        """Tells whether the worker is on this host and ready to run but gets no processor; False on other hosts."""
        return self.host == socket.gethostname() and _read_state(read_parent(self.pid)) == "R"

    def _send(self, kind: FrameKind, content: dict[str, Any]) -> None:
        try:
            self.connection.sendall(pack(kind, content))
        except OSError:
            # A broken connection is seen, and reported, where it is read.
            pass
