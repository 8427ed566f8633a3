"""One run of the ranks: a loop that accepts the workers, shows their output, and ends the run.

How a run ends:

* every rank ended with code 0: code 0.
* a rank failed (it raised, died, froze, or its host is gone): the others are told at once, which ends their blocked
  steps. They have `OWN_END_S` to end by themselves, then get SIGTERM, and SIGKILL `GRACE_S` after the failure. What
  they report meanwhile is hidden unless verbose; one line names the cause; its code is the run's. With
  ``max_restarts`` the run then starts again, on the hosts that still answer.
* SIGINT, SIGTERM or SIGHUP: passed on to every rank, SIGKILL after `GRACE_S`; code 128 + signal. A second one kills.
* the launcher itself is killed: workers and mpirun see it and end (worker.py; the death signal set below).
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from whale.errors import ClusterError
from whale.launcher import mpirun, ranks, segments, stalls
from whale.launcher.output import IDLE_S, Printer
from whale.launcher.protocol import HEARTBEAT_S, Kind
from whale.launcher.trace import TraceFile
from whale.launcher.worker import keep_alive

START_TIMEOUT_S = 120.0
OWN_END_S = 1.0
GRACE_S = 3.0
SILENCE_S = 4 * HEARTBEAT_S  # heartbeats may be late by that much, however short fault.freeze_s is
STALL_GATHER_S = 1.0  # between the first report of a wait and the line about it: others report theirs meanwhile
_READ_BYTES = 1 << 16
_HIDDEN_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STREAM_OF = {Kind.STDOUT: 0, Kind.STDERR: 1}


class Job:
    """The state of one run."""

    def __init__(
        self,
        options: mpirun.Options,
        listener: socket.socket,
        token: str,
        freeze_s: float,
        trace: TraceFile | None,
    ) -> None:
        self._options = options
        self._trace = trace
        self._freeze_s = freeze_s
        self._listener = listener
        self._token = token
        self._printer = Printer(options.ranks)
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, ranks.RankLink] = {}
        self._failures: list[ranks.Failure] = []
        self._mpirun_said: collections.deque[bytes] = collections.deque(maxlen=40)
        self._stopped_by: int | None = None
        self._sent: set[int] = set()  # signals that this process has sent to the ranks
        self._due: list[tuple[float, int]] = []  # those still to be sent: when, which
        self._looked_s = time.monotonic()
        self._stall_report_s = math.inf
        self._mpirun_gone_s = math.inf
        self._give_up_s = math.inf  # when to stop waiting for ranks that do not even end by SIGKILL
        self._wake, self._wake_writer = socket.socketpair()
        self._process: subprocess.Popen[bytes]

    def run(self, line: list[str], environment: dict[str, str]) -> int:
        for end in (self._wake, self._wake_writer, self._listener):
            end.setblocking(False)
        previous_wake = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, lambda *_: None) for number in (*_SIGNALS, signal.SIGCHLD)}
        try:
            self._process = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                self._register(self._wake, self._read_signals)
                self._register(self._listener, self._accept)
                self._register(self._process.stdout, self._read_mpirun)
                self._loop()
                return self._conclude()
            except BrokenPipeError:
                # Nobody reads our output (`whale run ... | head`): end as any command in a pipe does.
                return 128 + signal.SIGPIPE
            finally:
                self._end_processes()
        finally:
            signal.set_wakeup_fd(previous_wake)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._wake.close()
            self._wake_writer.close()
            self._selector.close()

    def _register(self, source: Any, handler: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    # The loop

    @property
    def _complete(self) -> bool:
        return len(self._links) == self._options.ranks

    @property
    def _running(self) -> bool:
        return any(not link.exited for link in self._links.values())

    @property
    def _ending(self) -> bool:
        return self._stopped_by is not None or bool(self._failures)

    def _loop(self) -> None:
        start_by_s = time.monotonic() + START_TIMEOUT_S
        # A run that is being ended need not wait for ranks that have not come up.
        while self._running or not (self._complete or self._ending):
            deadlines_s = [self._give_up_s, self._looked_s + HEARTBEAT_S, *(when_s for when_s, _ in self._due)]
            for link in self._links.values():
                if link.stopped_s is not None and link.freeze_s:
                    deadlines_s.append(link.stopped_s + link.freeze_s)
            if not self._complete:
                deadlines_s.append(start_by_s)
            if self._process.poll() is not None:
                deadlines_s.append(time.monotonic() + IDLE_S)
            if self._printer.waits:
                deadlines_s.append(time.monotonic() + IDLE_S)
            ready = self._selector.select(max(0.0, min(deadlines_s) - time.monotonic()))
            for key, _ in ready:
                key.data()
            self._printer.flush_idle()
            self._look_after_ranks()
            self._send_due()
            if not ready and time.monotonic() > self._give_up_s:
                return
            if not self._complete and not self._ending and time.monotonic() > start_by_s:
                raise self._did_not_start(f"within {START_TIMEOUT_S:g} s")
            # Workers stay until their connection is closed, so mpirun cannot be through before that. What they still
            # have to say is read first.
            if self._process.poll() is not None:
                self._mpirun_gone_s = min(self._mpirun_gone_s, time.monotonic())
                if not ready or time.monotonic() > self._mpirun_gone_s + OWN_END_S:
                    self._mpirun_is_gone()

    def _look_after_ranks(self) -> None:
        """Finds ranks that are frozen, or that others wait for in vain; says who waits for whom when asked to."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * HEARTBEAT_S:
            # This process was stopped, or had to wait until its output was read: what it has not heard says nothing.
            for link in self._links.values():
                link.heard_s = now_s
        self._looked_s = now_s
        if self._trace is not None:
            self._trace.look_after(self._links.values())
        for link in self._links.values():
            failure = link.frozen(now_s, SILENCE_S)
            if failure is not None:
                # A silent worker will not report an end; a stopped script can still be killed, and that is reported.
                link.exited = link.stopped_s is None
                link.freeze_s = 0.0
                self._failed(failure)
                link.send_signal(signal.SIGKILL)  # no other signal reaches a stopped process
        waiting = next((link.rank for link in self._links.values() if link.joining), None)
        for rank, link in self._links.items():
            if waiting is not None and link.code == 0 and link.joining is None and not self._ending:
                self._failed(ranks.absent(rank, waiting))
        if now_s >= self._stall_report_s:
            self._stall_report_s = math.inf
            self.say(stalls.report(self._links, now_s))

    @property
    def failed(self) -> bool:
        """Whether the run ended because of a rank, and not because it was told to."""
        return self._stopped_by is None and bool(self._failures)

    def say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        self._printer.say(f"whale run: {text}")

    def _mpirun_is_gone(self) -> None:
        if not self._complete and not self._ending:
            raise self._did_not_start("mpirun has ended")
        for link in self._links.values():
            link.exited = True
        if not self._ending:
            code = self._process.returncode
            reason = "was lost: mpirun has ended" + (f" with code {code}" if code > 0 else f" by signal {-code}")
            self._failures.append(ranks.Failure(0, 1, reason))

    def _did_not_start(self, when: str) -> ClusterError:
        said = self._mpirun_text()
        return ClusterError(
            f"the ranks did not start: {when}",
            given=f"{self._options.ranks} ranks, {len(self._links)} came up",
            mpirun_said="\n    " + "\n    ".join(said.splitlines()) if said else "nothing",
            expected="mpirun starts Python with whale installed, at the same path, on every host",
            action="run again with -v; try `mpirun -np 1 hostname` on the hosts given",
        )

    def _mpirun_text(self) -> str:
        return b"".join(self._mpirun_said).decode(errors="replace").strip()

    # Events

    def _read_signals(self) -> None:
        for number in self._wake.recv(_READ_BYTES):
            if number not in _SIGNALS:
                continue
            if self._stopped_by is not None:
                self._signal_ranks(signal.SIGKILL)
                continue
            self._stopped_by = number
            self._end_by_s(time.monotonic() + GRACE_S)
            self._signal_ranks(number)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        keep_alive(connection)
        link = ranks.RankLink(connection, freeze_s=self._freeze_s)
        self._register(connection, lambda: self._read_link(link))

    def _read_link(self, link: ranks.RankLink) -> None:
        try:
            data = link.connection.recv(_READ_BYTES)
            frames = link.unpacker.feed(data)
        except (OSError, ValueError):
            data, frames = b"", []
        link.heard_s = time.monotonic()
        for kind, payload in frames:
            if link.rank is not None:
                self._handle(link, link.rank, kind, payload)
            elif not self._greet(link, kind, payload):
                data = b""
                break
        if not data:
            self._selector.unregister(link.connection)
            link.connection.close()
            if link.rank is not None and not link.exited:
                link.exited = True
                self._failed(ranks.lost(link.rank, link.host))

    def _greet(self, link: ranks.RankLink, kind: Kind, payload: bytes) -> bool:
        rank = link.greet(kind, payload, self._token, self._options.ranks)
        if rank is None or rank in self._links:
            link.rank = None
            return False
        self._links[rank] = link
        if self._trace is not None:
            self._trace.greet(link)
        if self._ending:
            link.send_signal(signal.SIGKILL)
        return True

    def _handle(self, link: ranks.RankLink, rank: int, kind: Kind, payload: bytes) -> None:
        if kind in _STREAM_OF:
            # After the first failure, or when being stopped, the ranks complain about exactly that.
            if kind is Kind.STDERR and self._ending and not self._options.verbose:
                link.hidden += payload[: _HIDDEN_BYTES - len(link.hidden)]
            else:
                self._printer.write(rank, _STREAM_OF[kind], payload)
        elif kind is Kind.FAILURE:
            link.raised = True
            self._failed(ranks.raised(rank, json.loads(payload)))
        elif kind is Kind.EXIT:
            link.exited, link.stopped_s = True, None
            self._printer.flush_rank(rank)
            status = json.loads(payload)
            link.code = status["code"]
            failure = ranks.ended(rank, status)
            if failure is None:
                # Ranks to which it has said good-bye know it better.
                self._tell_others(rank, "has ended without wh.shutdown (exit code 0)")
            elif not link.raised:
                self._failed(failure)
        elif kind is Kind.STOPPED:
            link.stopped_s = time.monotonic() if json.loads(payload)["stopped"] else None
        elif kind is Kind.SCRIPT:
            self._handle_script(link, json.loads(payload))
        elif kind in (Kind.CLOCK, Kind.TRACE) and self._trace is not None:
            self._trace.take(link, kind, payload)

    def _handle_script(self, link: ranks.RankLink, message: dict[str, Any]) -> None:
        link.joining = message.get("joining", link.joining)
        link.freeze_s = message.get("freeze_s", link.freeze_s)
        link.counters = message.get("counters", link.counters)
        if "stall" in message and not self._ending:
            link.stall = message["stall"]
            self._stall_report_s = min(self._stall_report_s, time.monotonic() + STALL_GATHER_S)

    def _tell_others(self, rank: int, what: str) -> None:
        for other in self._links.values():
            if other.rank != rank and not other.exited:
                other.tell_lost(rank, what)

    def _failed(self, failure: ranks.Failure) -> None:
        if failure.signal and failure.signal in self._sent:
            return
        if self._trace is not None:
            self._trace.mark(failure.rank, f"rank {failure.rank} {failure.reason}")
        if self._options.verbose:
            self._printer.write_lines(failure.rank, 1, failure.traceback)
        if self._stopped_by is not None:
            return
        if not failure.is_consequence:
            self._tell_others(failure.rank, failure.reason)
        # What this rank wrote before its own failure, though after another's, explains it as well.
        text = self._links[failure.rank].hidden.decode(errors="replace") + failure.traceback
        self._failures.append(dataclasses.replace(failure, traceback=text))
        if len(self._failures) == 1:
            now_s = time.monotonic()
            self._due.append((now_s + OWN_END_S, signal.SIGTERM))
            self._end_by_s(now_s + GRACE_S)

    def _read_mpirun(self) -> None:
        assert self._process.stdout is not None  # a pipe was asked for
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        if not data:
            self._selector.unregister(self._process.stdout)
            return
        self._mpirun_said.append(data)
        if self._options.verbose:
            self._printer.say(data.decode(errors="replace").rstrip("\n"))

    # The end

    def _end_by_s(self, when_s: float) -> None:
        self._due.append((when_s, signal.SIGKILL))
        self._give_up_s = min(self._give_up_s, when_s + GRACE_S)

    def _signal_ranks(self, number: int) -> None:
        self._sent.add(number)
        for link in self._links.values():
            if not link.exited:
                link.send_signal(number)

    def _send_due(self) -> None:
        now_s = time.monotonic()
        for when_s, number in list(self._due):
            if when_s <= now_s:
                self._due.remove((when_s, number))
                self._signal_ranks(number)

    def _end_processes(self) -> None:
        """Closes the connections, upon which workers and mpirun end; kills what does not."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj not in (self._wake, self._listener):
                key.fileobj.close()
        # Workers that never connected have nothing to see closed.
        for number in (0, signal.SIGTERM, signal.SIGKILL) if self._complete else (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                # Reads on while it waits, or an mpirun with much to say would never end.
                self._process.communicate(timeout=GRACE_S)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        # A worker that was killed, or is frozen, has not ended what its script had started.
        for link in self._links.values():
            if link.code is None and link.host == socket.gethostname():
                ranks.kill_group(link.pid, self._token)
        shutil.rmtree(segments.folder_of(self._token), ignore_errors=True)
        # Open MPI 5 keeps its files here, and leaves them when it is killed.
        shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{self._process.pid}"), ignore_errors=True)

    def _conclude(self) -> int:
        self._printer.close()
        known = {rank: link.counters for rank, link in self._links.items() if link.counters}
        if self._options.verbose and known:
            from whale.launcher import counters  # rich takes a moment to load

            width = shutil.get_terminal_size((120, 24)).columns
            self._printer.say(counters.tables(known, self._options.ranks, width))
        if self._trace is not None:
            self._trace.end(self._links.values())
            self.say(self._trace.summary())
        if self._stopped_by is not None:
            self.say(f"stopped by {ranks.signal_name(self._stopped_by)}")
            return 128 + self._stopped_by
        if not self._failures:
            return 0
        cause = ranks.cause(self._failures)
        if not self._options.verbose:
            self._printer.write_lines(cause.rank, 1, cause.traceback)
            # mpirun speaks up only when it ended the ranks itself, as after MPI_Abort.
            if cause.signal in (signal.SIGTERM, signal.SIGKILL) and self._mpirun_said:
                self._printer.say(self._mpirun_text())
        self.say(f"rank {cause.rank} {cause.reason}")
        return cause.code


def _end_with_parent() -> None:
    """In mpirun, before it starts: a SIGTERM when the launcher dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
