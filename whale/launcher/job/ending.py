"""Brings a run to its end: who failed or stopped it, who is told, and which signals the ranks get when.

Decision: 0006.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from whale.launcher.job import ranks
from whale.launcher.job.output import Printer
from whale.launcher.job.trace import TraceFile

OWN_END_S = 1.0
GRACE_S = 3.0


class Ending:
    """The end of one run, from the moment when something brings it about.

    Args:
        links: the ranks that have come up; the caller adds those that follow.
        printer: shows the traceback of every failure, when ``verbose``.
        trace: gets a mark for each failure, or None.
        verbose: whether every rank's errors are shown as they come.

    Attributes:
        failures: in the order in which they were reported, without those that follow from being stopped.
        stopped_by: the signal with which this process was told to stop, or None.
        notice_s: how long the ranks have to save, where it was SIGTERM and their scripts do so; else 0.
        left: the failures of ranks without which the run goes on, by rank.
        goes_on_without: is given what the others are told of a rank without which they go on.
        give_up_s: when to stop waiting for ranks that do not even end by SIGKILL; monotonic time.
    """

    def __init__(
        self, links: Mapping[int, ranks.RankLink], printer: Printer, trace: TraceFile | None, verbose: bool
    ) -> None:
        self._links = links
        self._printer = printer
        self._trace = trace
        self._verbose = verbose
        self.failures: list[ranks.Failure] = []
        self.stopped_by: int | None = None
        self.notice_s = 0.0
        self.left: dict[int, ranks.Failure] = {}
        self.goes_on_without: Callable[[dict[str, Any]], None] = lambda message: None
        self.give_up_s = math.inf
        self._sent: set[int] = set()  # signals that this process has sent to the ranks
        self._due: list[tuple[float, int]] = []  # those still to be sent: when, which

    @property
    def has_begun(self) -> bool:
        """Tells whether the run is being ended."""
        return self.stopped_by is not None or bool(self.failures)

    @property
    def is_failure(self) -> bool:
        """Tells whether the run ends because of a rank, and not because it was told to."""
        return self.stopped_by is None and bool(self.failures)

    @property
    def deadlines_s(self) -> list[float]:
        """Returns the monotonic times at which there is something to do next."""
        return [self.give_up_s, *(when_s for when_s, _ in self._due)]

    def stop(self, number: int) -> None:
        """Handles a signal that this process got: the ranks get it too, or are killed if it is not the first one."""
        if self.stopped_by is not None:
            self._signal_ranks(signal.SIGKILL)
            return
        self.stopped_by = number
        if number == signal.SIGTERM:
            self.notice_s = max((link.notice_s for link in self._links.values() if not link.exited), default=0.0)
        if self.notice_s:
            self._printer.say(f"whale run: told to end by SIGTERM: the ranks have {self.notice_s:g} s to save")
        self._find_deadline_s(time.monotonic() + max(self.notice_s, GRACE_S))
        self._signal_ranks(number)

    def fail(self, failure: ranks.Failure) -> None:
        """Handles a rank's failure: tells the others, and begins the run's end unless they go on without it."""
        if (failure.signal and failure.signal in self._sent) or failure.rank in self.left:
            return
        if self._trace is not None:
            self._trace.mark(failure.rank or 0, f"{failure.subject} {failure.reason}")
        if self._verbose and failure.rank is not None:
            self._printer.write_lines(failure.rank, 1, failure.traceback)
        if self.stopped_by is not None and not self.notice_s:
            return
        if failure.rank is not None and failure.gone and self._can_others_go_on(failure.rank):
            self.left[failure.rank] = failure
            self._printer.say(f"whale run: {failure.subject} {failure.reason}; the others go on without it")
            self.tell_others(failure.rank, failure.reason, goes_on=True)
            return
        saved = self.notice_s > 0 and failure.is_exit_by_script  # and the others go on to save
        if not failure.is_consequence and not saved:
            self.tell_others(failure.rank, failure.reason)
        # The text that this rank wrote before its own failure, though after another's, explains it as well.
        hidden = self._links[failure.rank].hidden if failure.rank is not None else b""
        text = hidden.decode(errors="replace") + failure.traceback
        self.failures.append(dataclasses.replace(failure, traceback=text))
        if not saved and len([f for f in self.failures if not (self.notice_s and f.is_exit_by_script)]) == 1:
            now_s = time.monotonic()
            if self.stopped_by is None:
                self._due.append((now_s + OWN_END_S, signal.SIGTERM))
            self._find_deadline_s(now_s + GRACE_S)

    def settle(self) -> None:
        """Counts ranks that were lost after the last step as failures: what they still had to do is missing."""
        if self.stopped_by is not None:
            return
        for rank, failure in list(self.left.items()):
            without = any(link.members and rank not in link.members for link in self._links.values())
            if not without and not failure.wanted:
                what = "after the last step of the run: what it was still to do, such as saving, is missing"
                self.failures.append(dataclasses.replace(self.left.pop(rank), reason=f"{failure.reason} {what}"))

    def tell_others(self, rank: int | None, what: str, goes_on: bool = False) -> None:
        """Tells the scripts that still run what became of a rank, or of mpirun; ``what`` goes on after "rank 1"."""
        if goes_on:
            self.goes_on_without({"rank": rank, "what": what, "goes_on": True})
        for other in self._links.values():
            if other.rank != rank and not other.exited:
                other.tell_lost(rank, what, goes_on)

    def _can_others_go_on(self, rank: int) -> bool:
        """Tells whether the scripts of all other ranks still run and can go on without this one."""
        others = [link for other, link in self._links.items() if other != rank and other not in self.left]
        return not self.has_begun and bool(others) and all(link.elastic and not link.exited for link in others)

    def send_due(self) -> None:
        """Sends the ranks the signals whose time has come."""
        now_s = time.monotonic()
        for when_s, number in list(self._due):
            if when_s <= now_s:
                self._due.remove((when_s, number))
                self._signal_ranks(number)

    def _find_deadline_s(self, when_s: float) -> None:
        self._due.append((when_s, signal.SIGKILL))
        self.give_up_s = min(self.give_up_s, when_s + GRACE_S)

    def _signal_ranks(self, number: int) -> None:
        self._sent.add(number)
        for link in self._links.values():
            if not link.exited:
                link.send_signal(number)
