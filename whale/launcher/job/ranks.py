"""Holds what the launcher knows about each rank (`RankLink`), and describes how ranks fail (`Failure`).

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

# A worker that has sent nothing for _ASKS_S is asked for its time, again every _ASKS_S. If its host has acknowledged
# data in the last _REACHED_S, it gets _RESUMES_S beyond fault.freeze_s: TCP resends a lost heartbeat within a second.
_ASKS_S, _REACHED_S, _RESUMES_S = 1.0, 1.5, 1.5


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes the failure of a rank, or of mpirun.

    Attributes:
        rank: the rank that failed; None: mpirun failed.
        code: exit code that the run gets from this failure.
        reason: what happened, as the end of a sentence that starts with "rank 1" or "mpirun".
        error_type: class name of the Python exception, or "".
        traceback: text to print, or "".
        signal: the signal that killed the rank, or 0.
        gone: whether the rank's process was taken away (killed, frozen, lost) through no fault of its script, so that
          an elastic run can go on without it.
        wanted: whether the rank was ended on purpose, because the list of hosts allows fewer ranks.
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
        """Returns True if the script itself ended with a non-zero code, as by ``sys.exit``, not by an exception or a
        signal.
        """
        return not (self.error_type or self.signal)

    @property
    def is_consequence(self) -> bool:
        """Returns True if this failure is only a CommError, which reports that another rank has failed."""
        return self.error_type == CONSEQUENCE


def make_raised_failure(rank: int, report: RaisedReport) -> Failure:
    """Creates the failure of a rank whose script raised an exception or called ``sys.exit`` with a non-zero code."""
    code, kind = report.code, report.type
    if not kind:
        return Failure(rank, code, f"failed: exit code {code}")
    first_line = report.message.strip().partition("\n")[0]
    if first_line == "in user code:":  # AutoGraph's message begins with the place and ends with the error itself
        first_line = report.message.strip().rpartition("\n")[2].strip().removeprefix(f"{kind}: ")
    what = f"{kind}: {first_line}" if first_line else kind
    return Failure(rank, code, f"failed: {what} (exit code {code})", kind, report.traceback)


def make_exit_failure(rank: int, host: str, status: ExitStatus) -> Failure | None:
    """Creates the failure of a rank whose process has ended with this status; None for exit code 0."""
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
    """Creates the failure of mpirun for the case that the ranks are told to end by a signal which the launcher did not
    send.

    Either mpirun received the signal and passes it on, or somebody sent it to the worker of `rank` itself.

    Args:
        rank: the first rank whose worker received the signal.
        number: the signal.
    """
    how = f"was told to end by {signal_name(number)}, or the worker process of rank {rank} was"
    return Failure(None, 128 + number, how)


def _describe_memory_kill(host: str, kill: MemoryKill) -> str:
    """Describes that the kernel has killed a rank for lack of memory, as the end of a sentence that starts with "rank
    1".
    """
    held = f"its process held up to {kill.held_bytes / 2**20:.0f} MiB"
    where = (
        f"{host} was out of memory"
        if kill.limit_bytes is None
        else f"{host} limits the memory of its control group to {kill.limit_bytes / 2**20:.0f} MiB"
    )
    return f"was killed by the kernel (SIGKILL), since {where}; {held}: raise the limit, or give the host fewer ranks"


def make_lost_failure(rank: int, host: str) -> Failure:
    """Creates the failure of a rank whose worker's connection broke without a report of the script's end."""
    what = f"was lost: its connection from {host} broke, since its process was killed or the host is gone"
    return Failure(rank, 1, what, gone=True)


def make_unreadable_failure(rank: int, host: str, why: object) -> Failure:
    """Creates the failure of a rank whose connection delivers data that is no frame; `why` is the parser's error."""
    return Failure(rank, 1, f"was lost: its connection from {host} delivered data that is no message of a rank: {why}")


def make_stopped_failure(rank: int, seconds: float) -> Failure:
    """Creates the failure of a rank whose process was stopped (as by SIGSTOP) for longer than ``fault.freeze_s``."""
    return Failure(rank, 1, f"is frozen: its process has been stopped for {seconds:.1f} s", gone=True)


def make_closed_failure(rank: int) -> Failure:
    """Creates the failure of a rank whose script closed file descriptors that belong to Whale and MPI, and runs on."""
    what = "has closed file descriptors that it did not open (those of Whale and MPI)"
    return Failure(rank, 1, f"cannot be reached: its script goes on, and {what}")


def make_stopped_mpirun_failure(seconds: float) -> Failure:
    """Creates the failure of an mpirun that was stopped (as by SIGSTOP), so that none of its ranks could end."""
    return Failure(None, 1, f"is frozen: its process has been stopped for {seconds:.1f} s")


def make_gone_mpirun_failure(code: int) -> Failure:
    """Creates the failure of an mpirun that ended before its ranks.

    Args:
        code: its exit code, or minus the number of the signal that killed it, as in ``subprocess``.
    """
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"has ended with code {code} before the ranks"
    return Failure(None, 1, how)


def make_lost_with_mpirun_failure(rank: int, host: str, mpirun: Failure) -> Failure:
    """Creates the failure of a rank whose host has an mpirun of its own that was stopped or killed."""
    return Failure(rank, 1, f"was lost: the mpirun of {host} {mpirun.reason}", gone=True)


def make_silent_failure(rank: int, host: str, seconds: float) -> Failure:
    """Creates the failure of a rank whose worker has sent nothing, not even heartbeats, for so many seconds."""
    return Failure(rank, 1, f"is frozen: nothing was heard from {host} for {seconds:.1f} s", gone=True)


def make_absent_failure(rank: int, waiting: int, called: bool) -> Failure:
    """Creates the failure of a rank whose script ended with code 0 while another rank waits for it in ``wh.init``.

    Args:
        rank: the rank that has ended.
        waiting: a rank that waits for it.
        called: whether the rank ended inside ``wh.init``; False: it never called it.
    """
    where = "inside wh.init" if called else "without calling wh.init"
    reason = f"has ended {where}, in which rank {waiting} waits for it"
    return Failure(rank, 1, reason)


def kill_group(pid: int, token: str) -> None:
    """Kills the process group of a script on this host: the script and its children.

    The script may have ended, and its number may have been reused for an unrelated process group. So a group is killed
    only if the environment of one of its processes contains the run's token, or names the script's process in
    ``WHALE_CONTROL``.

    Args:
        pid: process number of the script, which is the number of its group.
        token: the run's token.
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
    """Returns the fields of /proc/<pid>/stat from the state on (state, parent, ...); [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_parent(pid: int) -> int:
    """Returns the number of a process's parent; 0 if the process has ended."""
    return int(found[1]) if (found := _read_stat(pid)) else 0


def _read_state(pid: int) -> str:
    return found[0] if (found := _read_stat(pid)) else ""


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_cause(failures: list[Failure]) -> Failure:
    """Returns the failure that caused the others: the first one that is no CommError, else the first one."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


@dataclass(slots=True)
class RankLink:
    """Represents the connection to one worker, and holds what its rank has reported; the event loop has one per rank.
    Times are the launcher's monotonic time.

    Attributes:
        connection: the socket to the worker.
        unpacker: splits received bytes into frames.
        rank: the rank's number; None until the worker has greeted.
        host: name of the rank's host, as the host knows it.
        raised: whether the script has reported how it failed, so that its exit code adds nothing.
        exited: whether the script has ended, or the worker is lost.
        hidden: what the rank wrote to stderr after another rank's failure, not printed so far.
        code: exit code of the script, once it has ended.
        pid: process number of the script on its host.
        heard_s: when data last arrived from the worker.
        stopped_s: since when the script's process has been stopped (SIGSTOP), or None.
        freeze_s: seconds for which the rank may be stopped or silent before it counts as frozen; 0: no limit.
        notice_s: seconds that the script has to save after SIGTERM; 0: the script does not ask for notice.
        elastic: whether the script can go on when other ranks are gone.
        members: the ranks that took part after the last change that this rank has acted on; () before any change.
        address: "host:port" where ranks that were not started together with this one can connect to it, or "".
        start: the state that joining ranks have to begin with, if this rank has reported it; else "".
        joining: True while the script waits for the others in ``wh.init``; None before, False afterwards.
        stall: the latest report of a long wait, or None.
        trace: events received but not yet written to the trace file.
        clock: the offset of the clock of the rank's host.
        counters: what the rank has communicated, once reported.
        end: how the rank's run of Whale ended, once reported.
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
    _asked_s: float = -math.inf  # when a silent worker was last asked for its time
    _silent_s: float = math.inf  # since when the worker seems frozen; counts only if a second look agrees

    def greet(self, kind: FrameKind, payload: bytes, size: int, comes: Callable[[int], bool] | None) -> int | None:
        """Handles the first frame of a connection; returns the rank, or None if the frame is not from a worker of this
        run.

        Args:
            kind, payload: the frame, which has to be a `Hello`.
            size: number of ranks that the run was started with.
            comes: ``comes(rank)`` returns True if a joining rank of this number is expected; None if no ranks can join.
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
        """Asks the worker to send a signal to its script's process group; does nothing if the worker is gone."""
        self._send(FrameKind.SIGNAL, {"signal": int(number)})

    def tell_lost(self, rank: int | None, what: str, goes_on: bool = False) -> None:
        """Tells the script that another rank is gone.

        Args:
            rank: that rank, or None for mpirun.
            what: what happened, as the end of a sentence that begins with "rank 1".
            goes_on: whether the run goes on without that rank.
        """
        self.tell({"rank": rank, "what": what, "goes_on": goes_on})

    def tell_start(self, start: str, history: Sequence[dict[str, Any]]) -> None:
        """Tells the script of a joining rank the state to begin with, and all earlier messages about lost and joined
        ranks.
        """
        self.tell({"rank": None, "start": start, "history": list(history)})

    def tell(self, message: dict[str, Any]) -> None:
        """Sends the script a message, in the form that whale/distributed/watch.py reads."""
        self._send(FrameKind.LOST, message)

    def take(self, message: ScriptMessage) -> None:
        """Stores what a message of the script says about its rank."""
        for name in ("joining", "freeze_s", "notice_s", "elastic", "members", "address", "start"):
            if (said := getattr(message, name)) is not None:
                setattr(self, name, said)
        self.end = message.end or self.end
        self.counters = message.counters or self.counters

    def ask_clock(self) -> None:
        """Asks the worker for the time of its clock, which also shows whether the worker is alive."""
        self.clock.asked_ns = time.monotonic_ns()
        self._send(FrameKind.CLOCK, {"asked_ns": self.clock.asked_ns})

    def find_freeze(self, now_s: float, silence_s: float) -> Failure | None:
        """Returns a failure if this rank's process has been stopped, or its worker silent, for too long; else None.

        A worker that is merely starved of CPU time, or whose host acknowledges data again after an outage, gets more
        time.

        Args:
            now_s: monotonic time.
            silence_s: seconds that a worker may always be silent, even if `freeze_s` is shorter.
        """
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
        # Looks a second time, a moment later: data that the worker has just sent may still be on the way.
        self._silent_s = min(self._silent_s, now_s)
        return (
            make_silent_failure(self.rank, self.host, now_s - self.heard_s)
            if now_s - self._silent_s >= silence_s / 8
            else None
        )

    def _is_reached(self) -> bool:
        """Returns True if the rank's host, another one than this, acknowledges data again, so that TCP soon resends
        what was lost.
        """
        return self.host != socket.gethostname() and find_unacknowledged_s(self.connection) < _REACHED_S

    def _is_starved(self) -> bool:
        """Returns True if the worker, on this host, is ready to run but gets no processor; False on other hosts."""
        return self.host == socket.gethostname() and _read_state(read_parent(self.pid)) == "R"

    def _send(self, kind: FrameKind, content: dict[str, Any]) -> None:
        try:
            self.connection.sendall(pack(kind, content))
        except OSError:
            # A broken connection is seen, and reported, where it is read.
            pass
