"""Runs a thread that receives news of lost and joined ranks from `whale run`, and reports this rank's long waits to it.

A socket connects the script with the worker of `whale run` beside it. Both sides send lines of JSON:

    worker -> script   {"rank": 1, "what": "was killed by SIGKILL", "goes_on": false}   a rank is gone; null: mpirun
                       {"joined": [3], "addresses": {"0": "127.0.0.1:4321", ...}, "goes_on": true, "rank": null}
                       {"start": ..., "history": [...], "rank": null}   first message to a joining rank: all news so far
                       {"all": {"0": "127.0.0.1:4321", ...}, "rank": null}   where hosts have mpiruns of their own
    script -> worker   {"joining": true}, then {"joining": false, "freeze_s": 3.5, ...}   before and after connecting
                       {"address": ..., "start": ...}, {"ready": true}   where ranks may join: see whale/runtime/elastic
                       {"members": [0, 2]}      the run goes on with these ranks: earlier news has been acted on
                       {"stall": {"what": ..., "seconds": ..., "missing": [...]}}    the longest wait
                       {"end": {"alone": "", "held": {"w#1/1[3]": [7, true]}}}      how this rank's run ended
                       {"counters": [...]}                                          what this rank has communicated
                       {"progress": {...}}                                          steps so far, and the one under way
                       {"plan": {"name": ..., "text": ...}}                         plans, with --logdir

Under other launchers there is no such socket: long waits are logged to stderr, and lost ranks are left to that
launcher.

Decision: 0163.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from whale.config import Config
from whale.distributed.trace import Trace
from whale.errors import ClusterError
from whale.log import log
from whale.replicas import Said
from whale.started import CONTROL_VARIABLE, COUNTERS_VARIABLE, PLANS_VARIABLE, own_descriptor
from whale_ops import Communicator, Wait
from whale_ops.communicator import NO_EXCHANGES

_T = TypeVar("_T")
_NAME_LIMIT = 100  # characters; the program of a session's run is named by all its fetches
_PAGE_BYTES = resource.getpagesize()

_START_S = 60.0
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 1.0
_WAITS_FROM_S = 1.0  # an exchange that waits longer is reported with the progress


@dataclasses.dataclass(frozen=True)
class RankChange:
    """Describes a change of a run's ranks: one is gone, or some have joined. Ranks are numbered as they were started.

    Attributes:
      gone: the rank that is gone, or None.
      joined: the ranks that have joined, or None.
      addresses: rank, as text -> address at which it listens, for all ranks that can be connected to after the change;
        None for a loss.
    """

    gone: int | None
    joined: Sequence[int] | None
    addresses: Mapping[str, str] | None


class LauncherWatch:
    """Runs the thread that listens to `whale run`, from construction to ``stop``, and that watches a communicator.

    Args:
      config: the configuration, for the keys under ``fault``.
      trace: records received and reported events; None: no trace.

    Attributes:
      progress: counts steps for `whale run`; None under other launchers.
    """

    def __init__(self, config: Config, trace: Trace | None = None):
        self._config = config
        self._trace = trace
        self._comm: Communicator | None = None
        self._heard: list[dict[str, Any]] = []  # news in the order in which `whale run` sent it, the same on all ranks
        self._known = 0  # number of changes of ranks that the communicator takes into account
        self._start = ""
        self._all: dict[int, str] = {}
        self._members: Sequence[int] = ()  # ranks of the communicator, numbered as they were started; (): all
        self._lock = threading.Condition()
        self._tell_lock = threading.Lock()
        self._launcher = _open_launcher_socket()
        self._wake, self._wake_writer = os.pipe()
        self._report_after_s = config["fault.stall_s"]
        self.progress = StepProgress() if self._launcher is not None else None
        self._tell_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="whale-watch", daemon=True)
        self._tell({"joining": True})
        self._thread.start()

    def look_after(self, comm: Communicator | None, members: Sequence[int] = (), known: int = 0) -> None:
        """Watches a communicator from now on: its operations fail when a rank is gone, and long waits are reported.

        Args:
          comm: the communicator; None: this rank is alone.
          members: the ranks that it connects, numbered as they were started; () for all ranks of the run.
          known: number of changes (entries of ``list_changes``) that had happened when the communicator was created, so
            that they are not applied to it.
        """
        with self._lock:
            self._comm, self._members, self._known = comm, members, known
            changes = self._list_messages()
            for message in self._heard:
                if not any(message is change for change in changes[:known]):
                    self._lose(message)
        config = self._config
        limits = {"freeze_s": config["fault.freeze_s"], "notice_s": config["fault.notice_s"]}
        self._tell({"joining": False, **limits, "elastic": bool(config["fault.elastic"])})

    def list_changes(self, more_than: int, timeout_s: float) -> list[RankChange]:
        """Returns all changes of ranks so far, in the order in which `whale run` announced them, which is the same on
        all ranks.

        Waits until there are more than `more_than`, or `timeout_s` seconds have passed.
        """
        with self._lock:
            self._lock.wait_for(lambda: len(self._list_messages()) > more_than, timeout_s)
            return [RankChange(*map(message.get, ("rank", "joined", "addresses"))) for message in self._list_messages()]

    @property
    def is_over(self) -> bool:
        """Returns True if the run cannot go on: a rank has ended or failed, and the others do not continue without
        it.
        """
        with self._lock:
            return any(not message.get("goes_on") for message in self._heard)

    def start(self) -> str:
        """Returns, in a process that joins the run, the state with which the run's ranks have begun; waits until `whale
        run` sends it.

        A rank of the run's start has sent it to `whale run`, as ``tell({"start": ...})``.

        Raises:
          ClusterError: `whale run` has not sent it within `_START_S` seconds.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._start, _START_S):
                raise ClusterError(
                    "this process is to join a run, but was not told the state with which that run has begun",
                    given=f"no message from `whale run` within {_START_S:g} s",
                    expected="a run of `whale run --hosts-from`, in which all ranks have called wh.init(elastic=True)",
                    action="read in the output of `whale run` whether the other ranks have failed",
                )
            return self._start

    def read_addresses(self) -> Mapping[int, str]:
        """Waits until all ranks of the run's start have reported the addresses at which they listen, and returns rank
        -> address.

        Returns an empty mapping if a rank is gone before that.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._all or self._heard)
            return self._all

    def tell(self, message: dict[str, Any]) -> None:
        """Sends `whale run` a message about this rank, one of those listed at the head of this module."""
        self._tell(message)

    def _list_messages(self) -> list[dict[str, Any]]:
        return [message for message in self._heard if message.get("goes_on")]

    def tell_counters(self) -> None:
        """Sends `whale run` what this rank has communicated, if `whale run -v` asks for it, and its steps so far.

        May be called repeatedly; the last message counts.
        """
        if self._comm is not None and COUNTERS_VARIABLE in os.environ:
            self._tell({"counters": [dataclasses.asdict(counter) for counter in self._comm.counters()]})
        if self.progress is not None and (news := self.progress.take_news(self._comm)) is not None:
            self._tell({"progress": news})

    def tell_plan(self, name: str, text: Callable[[], str]) -> None:
        """Sends `whale run` the plan of a program if --logdir asks for plans; else `text` is not called."""
        if self._launcher is not None and PLANS_VARIABLE in os.environ:
            self._tell({"plan": {"name": name, "text": text()}})

    def tell_end(self, alone: str, held: Callable[[], Said]) -> bool:
        """Tells `whale run` how this rank's run ends. Returns False if the process was started by another launcher.

        Args:
          alone: what the rank has trained by itself, as a sentence; "" if Whale has distributed its steps.
          held: returns descriptions of the rank's variables, which are compared between the ranks.
        """
        if self._launcher is not None:
            self._tell({"end": {"alone": alone, "held": {} if alone else held()}})
        return self._launcher is not None

    def stop(self) -> None:
        """Ends the thread, and leaves the socket open for the next ``LauncherWatch`` of this process."""
        self._tell({"joining": False})
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._wake_writer)
        if self._launcher is not None:
            self._launcher.detach()

    def _run(self) -> None:
        pending = b""
        sources = [self._wake] if self._launcher is None else [self._wake, self._launcher.fileno()]
        while True:
            ready, _, _ = select.select(sources, [], [], _LOOK_EVERY_S)
            if self._wake in ready:
                return
            if ready:
                assert self._launcher is not None  # it is the only other source
                data = self._launcher.recv(1 << 16)
                if not data:  # the worker is gone, and this process will be in a moment
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
            if self._comm is not None:
                self._look(self._comm)
            if self.progress is not None and time.monotonic() >= self._tell_at_s:
                self._tell_at_s = time.monotonic() + _TELL_EVERY_S
                if (news := self.progress.take_news(self._comm)) is not None:
                    self._tell({"progress": news})

    def _hear(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._start = message.get("start", self._start)
            if "start" in message:
                self._heard += message["history"]
                self._lock.notify_all()
                return
            if "all" in message:
                self._all = {int(rank): address for rank, address in message["all"].items()}
                self._lock.notify_all()
                return
            self._heard.append(message)
            self._lock.notify_all()
            if self._comm is not None:
                self._lose(message)
                self.tell_counters()  # later may be too late: this process may be ended soon
        if self._trace is not None:
            self._trace.mark(_format_lost(message))

    def _lose(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if self._comm is None:
            return
        if rank is None:
            self._comm.abort(_format_lost(message))
        elif not self._members:
            self._comm.lose(rank, message["what"])
        elif rank in self._members:
            self._comm.lose(self._members.index(rank), message["what"])

    def _look(self, comm: Communicator) -> None:
        stall_s, give_up_s = self._config["fault.stall_s"], self._config["fault.give_up_s"]
        waits = comm.waits()
        if not waits or waits[0].seconds < stall_s:
            self._report_after_s = stall_s
        elif waits[0].seconds >= self._report_after_s:
            self._report_after_s = 2 * waits[0].seconds
            self._report(comm.rank, waits[0])
        if give_up_s and waits and waits[0].seconds >= give_up_s:
            comm.abort(f"{_format_wait(comm.rank, waits[0])}, longer than fault.give_up_s")

    def _report(self, rank: int, wait: Wait) -> None:
        if self._trace is not None:
            self._trace.mark(_format_wait(rank, wait))
        if self._launcher is not None:
            self._tell({"stall": {"what": wait.what, "seconds": wait.seconds, "missing": wait.missing}})
            return
        log.warning(f"{_format_wait(rank, wait)}; look at what the script does on the ranks that are waited for")

    def _tell(self, message: dict[str, Any]) -> None:
        if self._launcher is not None:
            with self._tell_lock:
                self._launcher.sendall(json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n")


def _format_lost(message: dict[str, Any]) -> str:
    if "joined" in message:
        return f"rank {', '.join(map(str, message['joined']))} joins the run"
    who = "mpirun" if message["rank"] is None else f"rank {message['rank']}"
    return f"{who} {message['what']}"


def _format_wait(rank: int, wait: Wait) -> str:
    whom = f" for rank{'s' * (len(wait.missing) > 1)} {', '.join(map(str, wait.missing))}" if wait.missing else ""
    return f"rank {rank} has waited {wait.seconds:.0f} s in {wait.what}{whom}"


def _open_launcher_socket() -> socket.socket | None:
    descriptor = own_descriptor(CONTROL_VARIABLE)
    return None if descriptor is None else socket.socket(fileno=descriptor)


class StepProgress:
    """Counts the steps of this process by program, for ``LauncherWatch``, which sends reports to `whale run`.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[str, tuple[int, float]] = {}
        self._doing: tuple[str, float] | None = None  # the program that runs, and since when
        self._told: dict[str, Any] = {}
        self._told_more = False  # the latest message was about something under way
        self._begun_ns = time.monotonic_ns()

    def count_steps(self, call: Callable[..., _T], name: str) -> Callable[..., _T]:
        """Wraps a callable so that its calls are counted and timed under a program's name."""
        name = name[:_NAME_LIMIT]

        def run_counted(*args: Any) -> _T:
            start_s = time.perf_counter()
            self._doing = name, start_s
            try:
                result = call(*args)
            finally:
                self._doing = None
            taken_s = time.perf_counter() - start_s
            with self._lock:
                calls, seconds = self._programs.get(name, (0, 0.0))
                self._programs[name] = calls + 1, seconds + taken_s
            return result

        return run_counted

    def take_news(self, comm: Communicator | None) -> dict[str, Any] | None:
        """Returns a report as `whale.launcher.protocol.Progress`, or None if there is nothing new since the last call.

        News is a step that has ended, a step under way, or an exchange that waits.
        """
        with self._lock:
            programs = dict(self._programs)
        doing = self._doing
        waits = comm.waits()[:1] if comm is not None else []
        wait = next((one for one in waits if one.seconds >= _WAITS_FROM_S), None)
        more = doing is not None or wait is not None
        if programs == self._told and not more and not self._told_more:
            return None
        self._told, self._told_more = programs, more
        counters = comm.counters() if comm is not None else []
        exchanged = [c for c in counters if not c.key.startswith(NO_EXCHANGES)]
        return {
            "begun_ns": self._begun_ns,
            "programs": programs,
            "logical_bytes": sum(c.logical_bytes for c in exchanged),
            "sent_bytes": sum(c.wire_bytes for c in counters),
            "waiting_s": sum(c.waiting_seconds for c in exchanged),
            "memory_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "doing": (doing[0], time.perf_counter() - doing[1]) if doing is not None else None,
            "wait": wait and {"what": wait.what, "seconds": wait.seconds, "missing": list(wait.missing)},
        }
