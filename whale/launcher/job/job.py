"""Runs the launcher's event loop for one run: accepts workers, prints their output, and ends the run (ending.py).

How a run ends, and with which exit code:

* Every rank ended with code 0: the code is 0; 1 if trainable variables differ between the ranks; 2 if the ranks trained
  independently, or were given a plan or settings and never called ``wh.init()``.
* A rank failed (it raised, died, froze, or its host is gone): the others are told at once, which fails the exchanges
  that they are blocked in. They have `OWN_END_S` to end by themselves, then get SIGTERM, and SIGKILL `GRACE_S` after
  the failure. Their errors in that time are hidden unless `verbose`; one line names the cause, whose code is the run's.
  With ``max_restarts`` the run then starts again, on the hosts that still answer.
* A rank's process was taken away (killed, frozen, lost) and all other ranks are elastic: they go on without it.
* The launcher got SIGINT, SIGTERM or SIGHUP: it passes the signal on to every rank, and kills them after `GRACE_S`; the
  code is 128 + signal. A second signal kills them at once. After SIGTERM, ranks whose scripts ask `wh.preempted()` have
  `fault.notice_s` instead; the code is 0 if all of them end with 0.
* The launcher itself was killed: workers and mpirun notice it and end (worker.py; the death signal in
  mpirun_process.py).
"""

from __future__ import annotations

import functools
import math
import os
import select
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from whale.errors import ClusterError
from whale.launcher import shm_cleanup
from whale.launcher.job import ranks
from whale.launcher.job.ending import OWN_END_S, Ending
from whale.launcher.job.failure_detector import FailureDetector
from whale.launcher.job.mpirun_process import MpirunProcess, Mpiruns
from whale.launcher.job.output import IDLE_S, Printer
from whale.launcher.job.progress import RunProgress
from whale.launcher.job.start_probe import (
    AFTER_S,
    StartCause,
    StartProbe,
    explain_start,
    find_missing,
    find_start_cause,
)
from whale.launcher.job.status import StatusSocket, make_status
from whale.launcher.job.trace import TraceFile
from whale.launcher.mpirun import MpirunStart, Options, list_asked, list_places
from whale.launcher.protocol import (
    WELCOME,
    ExitStatus,
    FrameKind,
    RaisedReport,
    RankEnd,
    ScriptMessage,
    StopReport,
    unpack,
)
from whale.replicas import find_differing, in_words
from whale.token_listener import TokenListener

_HIDDEN_BYTES = 1 << 18
_STREAM_OF = {FrameKind.STDOUT: 0, FrameKind.STDERR: 1}

_MPIRUN_S = 3.0  # seconds for mpirun to end after each step: its workers were told to end, SIGTERM, SIGKILL
_LOST_S = 1.0  # the same after a host or worker was lost, since mpirun may never hear of that worker's end
START_TIMEOUT_S = 120.0
_READ_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Growth(Protocol):
    """Defines the interface of the object that starts ranks while a run goes on; `whale.launcher.scale_up.JoiningRanks`
    is one.

    Attributes:
        processes: the mpirun processes of all joining ranks.
        links: the connections of joining ranks that have not been admitted yet.
    """

    @property
    def processes(self) -> list[MpirunProcess]:
        """Returns the mpirun processes of all joining ranks, past and present."""
        ...

    @property
    def links(self) -> list[ranks.RankLink]:
        """Returns the connections of joining ranks that have not been admitted yet."""
        ...

    def ask(self) -> None:
        """Reads the list of hosts now, and starts the ranks that are missing."""

    def look(self) -> None:
        """Starts or admits joining ranks if the run is ready for it; called in every round of the event loop."""

    def is_expecting(self, rank: int) -> bool:
        """Returns True if a joining rank with this number was started and its worker has not connected yet."""
        ...

    def greet(self, link: ranks.RankLink, rank: int) -> bool:
        """Takes over a joining rank's connection.

        Returns:
            False if the rank belongs to the run's start, and the caller has to handle it.
        """
        ...

    def take(self, link: ranks.RankLink, rank: int, kind: FrameKind, payload: bytes) -> bool:
        """Handles a frame from a joining rank. Returns False if the rank takes part in the run already."""
        ...

    def lose(self, rank: int) -> bool:
        """Handles the broken connection of a joining rank. Returns False if the rank takes part in the run already."""
        ...

    def close(self) -> None:
        """Stops reading the list of hosts."""


class Job:
    """Runs one attempt of a run: accepts the workers, dispatches their frames, and holds the event loop.

    Args:
        options: the options of `whale run`.
        listener: the listening socket to which workers connect; the caller closes it.
        token: the secret that a worker has to send first.
        freeze_s: seconds for which a rank may be stopped or silent before it counts as frozen; 0: no limit.
        trace: receives the ranks' events, or None.
        progress: receives what the ranks report of their steps.
        status: the socket on which `whale top` asks for the run's status.
        grows: creates the object that starts joining ranks (see `Growth`); None: no ranks can join.
    """

    def __init__(
        self,
        options: Options,
        listener: socket.socket,
        token: str,
        freeze_s: float,
        trace: TraceFile | None,
        progress: RunProgress,
        status: StatusSocket,
        grows: Callable[..., Growth] | None = None,
    ) -> None:
        self._options = options
        self._trace = trace
        self._progress = progress
        self._status = status
        self._grows, self._freeze_s = grows, freeze_s
        self._listener = listener
        self._token = token
        self._printer = Printer(options.ranks, verbose=options.verbose)
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, ranks.RankLink] = {}
        self._ending = Ending(self._links, self._printer, trace, options.verbose)
        self._lookout = FailureDetector(self._links, self._ending, trace, self.say)
        self._reports = ReportHandler(self._printer, self._ending, self._lookout, trace, progress, options.verbose)
        others = [host.name for host in options.hosts if not host.is_local]
        self._local_names = {host.name for host in options.hosts if host.is_local}
        self._probe = StartProbe(others, listener.getsockname()[:2])
        self._mpirun_gone_s, self._hears_signals = math.inf, True
        self._wake, self._wake_writer = socket.socketpair()
        self._mpiruns: Mpiruns
        self._door: TokenListener
        self._growth: Growth | None = None

    def run(self, starts: Sequence[MpirunStart]) -> int:
        """Starts the ranks, runs the event loop until all processes have ended, and returns the run's exit code.

        Signals are handled only if this is the main thread, since Python allows no other; else the program handles
        them.

        Args:
            starts: the mpirun processes to start.

        Raises:
            ClusterError: the ranks did not start.
        """
        for end in (self._wake, self._wake_writer, self._listener):
            end.setblocking(False)
        previous: dict[int, Any] = {}
        self._hears_signals = threading.current_thread() is threading.main_thread()
        if self._hears_signals:
            previous_wake = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
            previous = {number: signal.signal(number, lambda *_: None) for number in (*_SIGNALS, signal.SIGCHLD)}
        try:
            self._mpiruns = Mpiruns(starts, self._freeze_s)
            try:
                self._register(self._wake, self._read_signals)
                self._register(self._status.listener, self._answer)
                self._door = TokenListener(self._listener, self._token, self._selector, self._welcome)
                for process in self._mpiruns.processes:
                    self._register(process.output, functools.partial(self._read_mpirun, process))
                if self._grows is not None:
                    self._growth = self._grows(self._links, self._ending, self._printer, self._selector)
                self._run_loop()
                return self._conclude()
            except BrokenPipeError:
                # Nobody reads our output (`whale run ... | head`): end as any command in a pipe does.
                return 128 + signal.SIGPIPE
            finally:
                self._end_processes()
        finally:
            if self._hears_signals:
                signal.set_wakeup_fd(previous_wake)
            for number, handler in previous.items():
                signal.signal(number, handler)
            for source in (self._wake, self._wake_writer, self._selector):
                source.close()

    @property
    def has_failed(self) -> bool:
        """Returns True if a restart may help: a rank failed, the launcher was not told to stop, and no rank trained
        alone.
        """
        alone = any(link.end is not None and link.end["alone"] for link in self._links.values())
        return self._ending.is_failure and not alone  # ranks that trained alone would do so again

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own to stderr, beginning with "whale run: "."""
        self._printer.say(f"whale run: {text}")

    def _register(self, source: Any, handler: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    # The loop

    @property
    def _is_complete(self) -> bool:
        return len(self._links) >= self._options.ranks

    @property
    def _is_running(self) -> bool:
        return any(not link.exited for link in self._links.values())

    def _run_loop(self) -> None:
        begun_s = time.monotonic()
        start_by_s = begun_s + START_TIMEOUT_S
        # A run that is being ended need not wait for ranks that have not come up.
        while self._is_running or not (self._is_complete or self._ending.has_begun):
            deadlines_s = [*self._ending.deadlines_s, *self._lookout.deadlines_s, *self._door.deadlines_s]
            if not self._is_complete:
                deadlines_s += [start_by_s, self._probe.find_deadline_s(begun_s)]
            if self._mpiruns.has_ended or self._printer.has_pending or not self._hears_signals:
                deadlines_s.append(time.monotonic() + IDLE_S)
            ready = self._selector.select(max(0.0, min(deadlines_s) - time.monotonic()))
            self._look_after_mpirun()  # before the ranks' connections break for the same reason
            for key, _ in ready:
                key.data()
            self._printer.flush_idle()
            self._door.look()
            self._lookout.look()
            self._ending.send_due()
            if self._growth is not None:
                self._growth.look()
            if not ready and time.monotonic() > self._ending.give_up_s:
                return
            if not self._is_complete and not self._ending.has_begun and time.monotonic() > begun_s + AFTER_S:
                self._probe.ask()
                if (blocked := self._probe.make_error()) is not None:
                    raise blocked
                for host in self._probe.take_silent():
                    left_s = start_by_s - time.monotonic()
                    self.say(
                        f"{host} does not answer: ssh from {socket.gethostname()} has come to no shell there yet; the "
                        f"run waits {left_s:.0f} s more\n  next: see that {host} is up and answers `ssh {host} true`"
                    )
                if time.monotonic() > start_by_s:
                    raise self._make_start_error(f"within {START_TIMEOUT_S:g} s")
            # Workers stay until the launcher closes their connections, so an mpirun that has ended by now was killed or
            # failed. What the workers have sent is read first.
            if self._mpiruns.has_ended or (self._mpiruns.has_any_ended and not self._is_complete):
                self._mpirun_gone_s = min(self._mpirun_gone_s, time.monotonic())
                if not ready or time.monotonic() > self._mpirun_gone_s + OWN_END_S:
                    self._handle_lost_mpirun()

    def _handle_lost_mpirun(self) -> None:
        if not self._is_complete and not self._ending.has_begun:
            raise self._make_start_error("mpirun has ended")
        for link in self._links.values():
            link.exited = True
        if not self._ending.has_begun:
            self._ending.fail(ranks.make_gone_mpirun_failure(self._mpiruns.processes[0].returncode))

    def _look_after_mpirun(self) -> None:
        """Checks whether an mpirun was stopped or killed; its ranks then fail, since they cannot end properly without
        it.
        """
        if not self._ending.has_begun:
            for failure in list(self._mpiruns.find_gone(self._is_complete, self._links)):
                self._ending.fail(failure)

    def _make_start_error(self, when: str) -> ClusterError:
        said = self._mpiruns.output_text
        here = socket.gethostname()
        places = list_places(self._options)
        missing = dict.fromkeys(host for rank, host in enumerate(places) if rank not in self._links)
        # A failure on another host ends the ranks of this host as well, so this host is named only if it is alone.
        others = [host for host in missing if host not in self._local_names]
        found = find_start_cause(said, others or list(missing), here)
        if not found.is_known and (lacks := find_missing([host for host in found.hosts if host != here])):
            cause = "; ".join(f"on {host} no file can be written in {what}" for host, what in lacks.items())
            found = StartCause(tuple(lacks), cause, "make room for files in that folder, or mount it writable")
        where = f" on {', '.join(found.hosts)}" if found.hosts and not self._options.is_local else ""
        return ClusterError(
            f"the ranks did not start{where}: {when}",
            given=f"{self._options.ranks} ranks, of which {len(self._links)} have connected to the launcher",
            **({"cause": found.cause} if found.cause else {}),
            mpirun_said="\n    " + "\n    ".join(said.splitlines()) if said else "nothing",
            expected="on every host, Python at the same path, with Whale installed, that mpirun can start",
            action=found.action,
        )

    # Events

    def _read_signals(self) -> None:
        for number in self._wake.recv(_READ_BYTES):
            if number == signal.SIGHUP and self._growth is not None:
                self._growth.ask()
            elif number in _SIGNALS:
                self._ending.stop(number)

    def _answer(self) -> None:
        self._status.answer(lambda: make_status(self._options, self._links, self._progress))

    def _welcome(self, connection: socket.socket, _: bytes) -> None:
        try:
            connection.sendall(WELCOME)
        except OSError:
            connection.close()
            return
        link = ranks.RankLink(connection, freeze_s=self._freeze_s)
        self._register(connection, lambda: self._read_link(link))

    def _read_link(self, link: ranks.RankLink) -> None:
        """Reads and dispatches what a worker has sent. Malformed data is no error of the launcher: the rank counts as
        lost.
        """
        wrong: Exception | None = None
        try:
            data = link.connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        link.heard_s = time.monotonic()
        try:
            for kind, payload in link.unpacker.feed(data):
                if link.rank is not None:
                    if self._growth is None or not self._growth.take(link, link.rank, kind, payload):
                        self._reports.take(link, link.rank, kind, payload)
                elif not self._greet(link, kind, payload):
                    data = b""
                    break
        except ValueError as error:
            data, wrong = b"", error
        if not data:
            self._selector.unregister(link.connection)
            link.connection.close()
            if link.rank is not None and not link.exited:
                link.exited = True
                if self._growth is not None and self._growth.lose(link.rank):
                    return
                gone = (
                    ranks.make_unreadable_failure(link.rank, link.host, wrong)
                    if wrong
                    else ranks.make_lost_failure(link.rank, link.host)
                )
                self._ending.fail(gone)

    def _greet(self, link: ranks.RankLink, kind: FrameKind, payload: bytes) -> bool:
        growth = self._growth
        rank = link.greet(kind, payload, self._options.ranks, growth.is_expecting if growth is not None else None)
        if rank is None or rank in self._links:
            link.rank = None
            return False
        if growth is not None and growth.greet(link, rank):
            return True
        self._links[rank] = link
        if self._trace is not None:
            self._trace.greet(link)
        self._progress.note_up(rank)
        if self._ending.has_begun:
            link.send_signal(signal.SIGKILL)
        return True

    def _read_mpirun(self, process: MpirunProcess) -> None:
        data = process.read()
        if not data:
            self._selector.unregister(process.output)
        elif self._options.verbose:
            self._printer.say(data.decode(errors="replace").rstrip("\n"))

    # The end

    def _end_processes(self) -> None:
        """Closes all connections, upon which workers and mpirun end, and kills those that do not."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj not in (
                self._wake,
                self._listener,
                self._status.listener,
            ):
                key.fileobj.close()
        # Workers that never connected do not notice that a connection closes: their mpirun has to end them.
        processes, links = list(self._mpiruns.processes), list(self._links.values())
        if self._growth is not None:
            self._growth.close()
            processes, links = processes + self._growth.processes, links + self._growth.links
        # mpirun would wait for ever for the end of a worker whose host is gone.
        blocked = not self._is_complete and self._probe.make_error() is not None
        lost = blocked or any(link.exited and link.code is None for link in links)
        for process in processes:
            process.end(_LOST_S if lost else _MPIRUN_S, by_itself=self._is_complete and not lost)
        if blocked:
            self._probe.end_daemons([process.pid for process in processes])
        self._probe.close()
        # A worker that was killed or is frozen has not killed the child processes of its script.
        for link in links:
            if link.code is None and link.host == socket.gethostname():
                ranks.kill_group(link.pid, self._token)
        shutil.rmtree(shm_cleanup.find_folder(self._token), ignore_errors=True)
        for process in processes:
            process.remove_files()

    def _conclude(self) -> int:
        self._printer.close()
        self._ending.settle()
        known = {rank: link.counters for rank, link in self._links.items() if link.counters}
        if self._options.verbose and known:
            from whale.launcher.job import counters  # rich takes a moment to load

            width = shutil.get_terminal_size((120, 24)).columns
            self._printer.say(counters.format_tables(known, self._options.ranks, width))
        if self._trace is not None:
            self._trace.end(self._links.values())
            self.say(self._trace.format_summary())
        if summary := self._progress.format_summary():
            self.say(summary)
        if self._ending.stopped_by is not None and not (self._ending.notice_s and self._ending.failures):
            if self._ending.notice_s and all(link.code == 0 for link in self._links.values()):
                self.say("stopped by SIGTERM; every rank has ended by itself with code 0")
                return 0
            self.say(f"stopped by {ranks.signal_name(self._ending.stopped_by)}")
            return 128 + self._ending.stopped_by
        ends = _list_ends(self._links, self._ending.left, self._options.ranks)
        if alone := next((end["alone"] for end in ends if end and end["alone"]), ""):
            self.say(alone)
            return 2
        if not self._ending.failures:
            for failure in self._ending.left.values():
                self.say(f"{failure.subject} {failure.reason}; the run went on without it, to its end")
            return self._end_well(ends)
        cause = ranks.find_cause(self._ending.failures)
        if cause.rank is None and not self._is_complete:  # mpirun ends those that have come up when another cannot
            self._read_last_words()
            raise self._make_start_error("not all ranks could be started, and mpirun has ended those that had")
        if not self._options.verbose and cause.rank is not None:
            self._printer.write_lines(cause.rank, 1, cause.traceback)
            # mpirun speaks up only when it ended the ranks itself, as after MPI_Abort.
            if cause.signal in (signal.SIGTERM, signal.SIGKILL) and self._mpiruns.output_text:
                self._printer.say(self._mpiruns.output_text)
        link = self._links.get(cause.rank) if cause.rank is not None and cause.is_exit_by_script else None
        if link is not None and link.joining and link.code:
            # Inside wh.init only MPI ends a process without an exception; mpirun prints the reason a moment later.
            self._read_last_words()
            why = explain_start(self._mpiruns.output_text)
            self.say(f"{self._name(cause)} failed: MPI did not start (exit code {cause.code})\n{why}")
            return cause.code
        advice = self._advise(cause)
        self.say(f"{self._name(cause)} {cause.reason}" + (f"\n  next: {advice}" if advice else ""))
        return cause.code

    def _name(self, failure: ranks.Failure) -> str:
        """Returns the subject of a sentence about a failure: "rank 1", or "rank 1 on node2" if the run is on several
        hosts.
        """
        link = self._links.get(failure.rank) if failure.rank is not None else None
        several = len({other.host for other in self._links.values()}) > 1
        if link is None or not several or link.host in failure.reason:
            return failure.subject
        return f"{failure.subject} on {link.host}"

    def _advise(self, failure: ranks.Failure) -> str:
        """Returns what to do about a module or file that is missing on one of several hosts; else ""."""
        link = self._links.get(failure.rank) if failure.rank is not None else None
        others = {other.host for other in self._links.values() if link is not None and other.host != link.host}
        if link is None or not others:
            return ""
        if failure.error_type in ("ModuleNotFoundError", "ImportError"):
            return f"install on {link.host} what {', '.join(sorted(others))} has, for the same Python"
        if failure.error_type == "FileNotFoundError":
            return f"put the missing file at the same path on {link.host}, or in a folder that all hosts share"
        return ""

    def _read_last_words(self) -> None:
        """Reads the rest of mpirun's output, until nothing has come for `OWN_END_S` seconds."""
        for process in self._mpiruns.processes:
            while select.select([process.output], [], [], OWN_END_S)[0] and process.read():
                continue

    def _end_well(self, ends: list[RankEnd | None]) -> int:
        """Returns the exit code of a run without failures, and warns if the ranks did not train together.

        The code is 1 if trainable variables differ between the ranks, 2 if settings had no effect because the script
        never called ``wh.init()``, else 0.

        Args:
            ends: how each rank ended its run of Whale; None for a rank that has not reported it.
        """
        if all(end is not None for end in ends):
            found, _ = find_differing([end["held"] for end in ends if end is not None])
            if found:
                self.say(
                    f"at the end of the run trainable variables differ between the ranks: {in_words(found)}; assign to "
                    "them on every rank, or inside a step, and train in steps that Whale distributes only"
                )
            return int(bool(found))
        joined = any(self._links[rank].joining is not None for rank in self._links)
        if len(ends) == 1 or joined or self._options.starts_another:
            return 0
        never = f"the script never called wh.init(): each of the {len(ends)} ranks has run all of it alone"
        if asked := list_asked(os.environ):
            self.say(f"{never}, without effect of {', '.join(asked)}; call wh.init() at the script's beginning")
            return 2
        self.say(f"warning: {never}")
        return 0


def _list_ends(links: Mapping[int, ranks.RankLink], gone: Collection[int], started: int) -> list[RankEnd | None]:
    """Returns how each rank ended its run of Whale, except for lost ranks and for joining ranks that were never
    admitted.

    Args:
        links: the connections of all ranks.
        gone: lost ranks without which the run went on.
        started: number of ranks that the run started with.
    """
    left = [rank for rank in sorted(links) if rank not in gone]
    return [links[rank].end for rank in left if links[rank].end or rank < started]


class ReportHandler:
    """Handles the frames of ranks that take part in the run; ``Job`` has one.

    Args:
        printer: prints the ranks' output.
        ending: receives failures and exits.
        lookout: the failure detector, which is told when a rank reports a long wait.
        trace: receives the ranks' events, or None.
        progress: receives what the ranks report of their steps.
        verbose: whether to print what ranks write to stderr while the run is being ended.
    """

    def __init__(
        self,
        printer: Printer,
        ending: Ending,
        lookout: FailureDetector,
        trace: TraceFile | None,
        progress: RunProgress,
        verbose: bool,
    ) -> None:
        self._printer = printer
        self._ending = ending
        self._lookout = lookout
        self._trace = trace
        self._progress = progress
        self._verbose = verbose

    def take(self, link: ranks.RankLink, rank: int, kind: FrameKind, payload: bytes) -> None:
        """Handles one frame of a rank.

        Raises:
            ValueError: the frame's payload is malformed.
        """
        if kind in _STREAM_OF:
            # After the first failure, or a signal to stop, the other ranks' errors only follow from that.
            if kind is FrameKind.STDERR and self._ending.has_begun and not self._verbose:
                link.hidden += payload[: _HIDDEN_BYTES - len(link.hidden)]
            else:
                self._printer.write(rank, _STREAM_OF[kind], payload)
        elif kind is FrameKind.FAILURE:
            link.raised = True
            self._ending.fail(ranks.make_raised_failure(rank, unpack(payload, RaisedReport)))
        elif kind is FrameKind.EXIT:
            self._take_exit(link, rank, unpack(payload, ExitStatus))
        elif kind is FrameKind.DEAF and link.joining is False:  # before wh.init it may have exec'ed another program
            self._ending.fail(ranks.make_closed_failure(rank))
        elif kind is FrameKind.STOPPED:
            link.stopped_s = time.monotonic() if unpack(payload, StopReport).stopped else None
        elif kind is FrameKind.SCRIPT:
            self._take_message(link, rank, unpack(payload, ScriptMessage))
        elif kind in (FrameKind.CLOCK, FrameKind.TRACE) and self._trace is not None:
            self._trace.take(link, kind, payload)

    def _take_exit(self, link: ranks.RankLink, rank: int, status: ExitStatus) -> None:
        link.exited, link.stopped_s = True, None
        self._printer.flush_rank(rank)
        link.code = status.code
        failure = ranks.make_exit_failure(rank, link.host, status)
        if status.told and status.code and not (link.elastic or self._ending.has_begun):
            self._ending.fail(ranks.make_told_failure(rank, status.told))
        elif failure is None:
            # Ranks that this one has left by wh.shutdown ignore the message.
            self._ending.tell_others(rank, "has ended without wh.shutdown (exit code 0)")
        elif not link.raised:
            self._ending.fail(failure)

    def _take_message(self, link: ranks.RankLink, rank: int, message: ScriptMessage) -> None:
        link.take(message)
        if message.progress is not None:
            self._progress.take(rank, message.progress)
        if message.plan is not None:
            self._progress.take_plan(rank, message.plan["name"], message.plan["text"])
        if message.stall is not None and not self._ending.has_begun:
            link.stall = message.stall
            self._lookout.expect_stalls()
