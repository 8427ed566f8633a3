"""Decides how a run ends: which failure is its cause, which ranks are told, and when they are sent which signal.

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
    """Tracks the end of one run, from the first failure of a rank or the first signal to the launcher.

    Args:
        links: the connections of the ranks; the caller adds those that connect later.
        printer: prints the traceback of every failure if `verbose`.
        trace: records each failure as an event, or None.
        verbose: whether every rank's errors are printed as they come, and not only those of the cause.

    Attributes:
        failures: the failures in the order in which they were reported, except those that the launcher's own signals
          caused.
        stopped_by: the signal that told the launcher to stop, or None.
        notice_s: seconds that the ranks have to save after SIGTERM (the largest ``fault.notice_s`` of the ranks); 0 if
          the launcher was not stopped by SIGTERM, or no script asks for notice.
        left: rank -> failure, of lost ranks without which an elastic run goes on.
        goes_on_without: called with each message that tells the other ranks to go on without a lost one; `JoiningRanks`
          keeps these messages for ranks that join later.
        give_up_s: monotonic time at which the launcher stops waiting for ranks that even SIGKILL has not ended.
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
        self._due: list[tuple[float, int]] = []  # signals still to be sent: (monotonic time, signal)

    @property
    def has_begun(self) -> bool:
        """Returns True if the run is being ended, because of a failure or of a signal to the launcher."""
        return self.stopped_by is not None or bool(self.failures)

    @property
    def is_failure(self) -> bool:
        """Returns True if the run ends because a rank (or mpirun) failed, and not because the launcher was told to
        stop.
        """
        return self.stopped_by is None and bool(self.failures)

    @property
    def deadlines_s(self) -> list[float]:
        """Returns the monotonic times at which the event loop has to wake up: signals that are due, and the time to
        give up.
        """
        return [self.give_up_s, *(when_s for when_s, _ in self._due)]

    def stop(self, number: int) -> None:
        """Handles a signal (by its number) that the launcher received: passes it on to the ranks, and kills them at the
        second one.
        """
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
        """Handles a rank's failure: tells the other ranks, and begins to end the run unless they can go on without that
        rank.

        A failure is ignored if a signal that the launcher sent caused it, or if the run has already gone on without
        that rank.
        """
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
        saved = self.notice_s > 0 and failure.is_exit_by_script  # the others go on, to save as well
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
        """At the end of a run that went on without lost ranks, counts those as failures whose loss came after the last
        step.

        No rank took a step without such a rank, so nobody did what it still had to do, such as saving. Ranks that were
        ended on purpose (`Failure.wanted`) are not counted.
        """
        if self.stopped_by is not None:
            return
        for rank, failure in list(self.left.items()):
            without = any(link.members and rank not in link.members for link in self._links.values())
            if not without and not failure.wanted:
                what = "after the last step of the run: what it was still to do, such as saving, is missing"
                self.failures.append(dataclasses.replace(self.left.pop(rank), reason=f"{failure.reason} {what}"))

    def tell_others(self, rank: int | None, what: str, goes_on: bool = False) -> None:
        """Tells the scripts that still run what happened to a rank.

        Args:
            rank: the rank, or None for mpirun.
            what: what happened, as the end of a sentence that begins with "rank 1", such as "was killed by SIGKILL".
            goes_on: whether the others are to go on without the rank, instead of failing their exchanges for good.
        """
        if goes_on:
            self.goes_on_without({"rank": rank, "what": what, "goes_on": True})
        for other in self._links.values():
            if other.rank != rank and not other.exited:
                other.tell_lost(rank, what, goes_on)

    def _can_others_go_on(self, rank: int) -> bool:
        """Returns True if the scripts of all other ranks still run, are elastic, and nothing else has begun to end the
        run.
        """
        others = [link for other, link in self._links.items() if other != rank and other not in self.left]
        return not self.has_begun and bool(others) and all(link.elastic and not link.exited for link in others)

    def send_due(self) -> None:
        """Sends the ranks the signals (SIGTERM, SIGKILL) whose time has come."""
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
