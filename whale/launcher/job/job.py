"""Runs the loop of one run, which accepts workers, shows their output (reports.py), and ends the run (ending.py).

How a run ends:

* every rank ended with code 0: code 0; 2 if each trained alone, or never started Whale and was given a plan for it.
* a rank failed (it raised, died, froze, or its host is gone): the others are told at once, which ends their blocked
  steps. They have `OWN_END_S` to end by themselves, then get SIGTERM, and SIGKILL `GRACE_S` after the failure. What
  they report meanwhile is hidden unless verbose; one line names the cause; its code is the run's. With
  ``max_restarts`` the run then starts again, on the hosts that still answer.
  Where all others run with ``elastic``, and its process was taken away (killed, frozen, lost), they go on without it.
* SIGINT, SIGTERM or SIGHUP: passed on to every rank, SIGKILL after `GRACE_S`; code 128 + signal. A second one kills.
  After SIGTERM ranks whose scripts ask `wh.preempted()` have `fault.notice_s` instead; code 0 if all end with it.
* the launcher itself is killed: workers and mpirun see it and end (worker.py; the death signal in mpirun_process.py).
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

_MPIRUN_S = 3.0  # that mpirun has to end, after each of nothing, SIGTERM and SIGKILL, when its workers are told to
_LOST_S = 1.0  # the same where a host or a worker is gone, which mpirun need not hear of any more
START_TIMEOUT_S = 120.0
_READ_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Growth(Protocol):
    """The interface of what starts ranks while a run goes on; see whale/launcher/scale_up.py.

    Attributes:
        processes: the mpiruns of all that it has started; links: of the ranks that have yet to come in.
    """

    @property
    def processes(self) -> list[MpirunProcess]:
        """Returns the mpiruns of all ranks that it has started."""
        ...

    @property
    def links(self) -> list[ranks.RankLink]:
        """Returns the connections of ranks that have yet to come in."""
        ...

    def ask(self) -> None:
        """Reads the list of hosts now."""

    def look(self) -> None:
        """Starts joining ranks, or has them come in, when it is time."""

    def is_expecting(self, rank: int) -> bool:
        """Tells whether a rank of this number was started, and has not come up yet."""
        ...

    def greet(self, link: ranks.RankLink, rank: int) -> bool:
        """Takes the connection of a rank that has come up; False: it is one of the run's start."""
        ...

    def take(self, link: ranks.RankLink, rank: int, kind: FrameKind, payload: bytes) -> bool:
        """Acts on a frame of a rank that has not come in; False: it is one of the run's."""
        ...

    def lose(self, rank: int) -> bool:
        """Handles the broken connection of a rank; False: it is one of the run's."""
        ...

    def close(self) -> None:
        """Stops asking for hosts."""


class Job:
    """One run: accepts the workers, passes on what they say, and holds the loop in which everything happens.

    Args:
        options: what `whale run` was asked for.
        listener: where the workers connect; the caller closes it.
        token: what they show that they are of this run.
        freeze_s: for how long a rank may be stopped or silent; 0 for as long as it likes.
        trace: takes the ranks' events, or None.
        progress: takes what they tell of their steps.
        status: answers who asks how the run is.
        grows: makes what starts ranks while the run goes on, as of `Growth`; None: none come.
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
        """Starts the ranks by mpirun, and returns the exit code of the run once all of it has ended.

        In another thread than the main one, which alone may, it leaves signals to the program.

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
        """Tells whether the run ended because of a rank, and not because it was told to."""
        alone = any(link.end is not None and link.end["alone"] for link in self._links.values())
        return self._ending.is_failure and not alone  # it would do the same again

    def say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
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
            # Workers stay until their connection is closed, so mpirun cannot be through before that. What they still
            # have to say is read first.
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
        """Checks whether an mpirun was stopped or killed; its ranks then fail, since none of them can end."""
        if not self._ending.has_begun:
            for failure in list(self._mpiruns.find_gone(self._is_complete, self._links)):
                self._ending.fail(failure)

    def _make_start_error(self, when: str) -> ClusterError:
        said = self._mpiruns.output_text
        here = socket.gethostname()
        places = list_places(self._options)
        missing = dict.fromkeys(host for rank, host in enumerate(places) if rank not in self._links)
        # What fails elsewhere ends this host's as well.
        others = [host for host in missing if host not in self._local_names]
        found = find_start_cause(said, others or list(missing), here)
        if not found.is_known and (lacks := find_missing([host for host in found.hosts if host != here])):
            cause = "; ".join(f"on {host} no file can be written in {what}" for host, what in lacks.items())
            found = StartCause(tuple(lacks), cause, "let files be made there: make room, or mount it writable")
        where = f" on {', '.join(found.hosts)}" if found.hosts and not self._options.is_local else ""
        return ClusterError(
            f"the ranks did not start{where}: {when}",
            given=f"{self._options.ranks} ranks, {len(self._links)} came up",
            **({"cause": found.cause} if found.cause else {}),
            mpirun_said="\n    " + "\n    ".join(said.splitlines()) if said else "nothing",
            expected="mpirun starts Python with whale installed, at the same path, on every host",
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
        """Reads what a connection has sent. Nothing of it is an error here: at worst the rank counts as lost."""
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
        """Closes the connections, upon which workers and mpirun end, and kills what does not."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj not in (
                self._wake,
                self._listener,
                self._status.listener,
            ):
                key.fileobj.close()
        # Workers that never connected have nothing to see closed.
        processes, links = list(self._mpiruns.processes), list(self._links.values())
        if self._growth is not None:
            self._growth.close()
            processes, links = processes + self._growth.processes, links + self._growth.links
        # A worker whose host is gone does not end, as far as its mpirun knows.
        blocked = not self._is_complete and self._probe.make_error() is not None
        lost = blocked or any(link.exited and link.code is None for link in links)
        for process in processes:
            process.end(_LOST_S if lost else _MPIRUN_S, by_itself=self._is_complete and not lost)
        if blocked:
            self._probe.end_daemons([process.pid for process in processes])
        self._probe.close()
        # A worker that was killed, or is frozen, has not ended what its script had started.
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
            raise self._make_start_error("mpirun has ended the ranks that had come up")
        if not self._options.verbose and cause.rank is not None:
            self._printer.write_lines(cause.rank, 1, cause.traceback)
            # mpirun speaks up only when it ended the ranks itself, as after MPI_Abort.
            if cause.signal in (signal.SIGTERM, signal.SIGKILL) and self._mpiruns.output_text:
                self._printer.say(self._mpiruns.output_text)
        link = self._links.get(cause.rank) if cause.rank is not None and cause.is_exit_by_script else None
        if link is not None and link.joining and link.code:
            # Inside of wh.init nothing but MPI ends a process so; it says why through mpirun, a moment later.
            self._read_last_words()
            why = explain_start(self._mpiruns.output_text)
            self.say(f"{self._name(cause)} failed: MPI did not start (exit code {cause.code})\n{why}")
            return cause.code
        advice = self._advise(cause)
        self.say(f"{self._name(cause)} {cause.reason}" + (f"\n  next: {advice}" if advice else ""))
        return cause.code

    def _name(self, failure: ranks.Failure) -> str:
        """Returns the subject of a sentence about a failure, with the rank's host where a run is on several."""
        link = self._links.get(failure.rank) if failure.rank is not None else None
        several = len({other.host for other in self._links.values()}) > 1
        if link is None or not several or link.host in failure.reason:
            return failure.subject
        return f"{failure.subject} on {link.host}"

    def _advise(self, failure: ranks.Failure) -> str:
        """Returns what to do about a rank that lacks something; "" where it is not another host than the others'."""
        link = self._links.get(failure.rank) if failure.rank is not None else None
        others = {other.host for other in self._links.values() if link is not None and other.host != link.host}
        if link is None or not others:
            return ""
        if failure.error_type in ("ModuleNotFoundError", "ImportError"):
            return f"install on {link.host} what {', '.join(sorted(others))} has, for the same Python"
        if failure.error_type == "FileNotFoundError":
            return f"put it at the same path on {link.host}, or in a folder that all hosts share"
        return ""

    def _read_last_words(self) -> None:
        """Reads what mpirun still has to say, until it has been silent for a moment."""
        for process in self._mpiruns.processes:
            while select.select([process.output], [], [], OWN_END_S)[0] and process.read():
                continue

    def _end_well(self, ends: list[RankEnd | None]) -> int:
        """Returns the exit code of a run without a failure: 1 if trainable variables differ between its ranks."""
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
            self.say(f"{never}, and nothing came of {', '.join(asked)}; call wh.init() at the script's beginning")
            return 2
        self.say(f"warning: {never}")
        return 0


def _list_ends(links: Mapping[int, ranks.RankLink], gone: Collection[int], started: int) -> list[RankEnd | None]:
    """Returns how each rank that is not gone ended its run; joining ranks that were never taken in are left out."""
    left = [rank for rank in sorted(links) if rank not in gone]
    return [links[rank].end for rank in left if links[rank].end or rank < started]


class ReportHandler:
    """The handler of frames from ranks that have come up.

    Args:
        printer: shows what they print.
        ending: is told how they end.
        lookout: is told when they wait.
        trace: takes their events, or None.
        progress: takes what they tell of their steps.
        verbose: whether what they write to stderr is shown while the run is being ended too.
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
        """Acts on one frame of a rank.

        Raises:
            ValueError: no worker sends this.
        """
        if kind in _STREAM_OF:
            # After the first failure, or when being stopped, the ranks complain about exactly that.
            if kind is FrameKind.STDERR and self._ending.has_begun and not self._verbose:
                link.hidden += payload[: _HIDDEN_BYTES - len(link.hidden)]
            else:
                self._printer.write(rank, _STREAM_OF[kind], payload)
        elif kind is FrameKind.FAILURE:
            link.raised = True
            self._ending.fail(ranks.make_raised_failure(rank, unpack(payload, RaisedReport)))
        elif kind is FrameKind.EXIT:
            self._take_exit(link, rank, unpack(payload, ExitStatus))
        elif kind is FrameKind.DEAF and link.joining is False:  # else it may have become another program
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
            # Ranks to which it has said good-bye know it better.
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
