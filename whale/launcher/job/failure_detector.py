"""Detects ranks of a run that are frozen or wait in vain, and says who waits for whom."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping

from whale.launcher.job import ranks, stalls
from whale.launcher.job.ending import Ending
from whale.launcher.job.trace import TraceFile
from whale.launcher.protocol import HEARTBEAT_S

SILENCE_S = 4 * HEARTBEAT_S  # heartbeats may be late by that much, however short fault.freeze_s is
STALL_GATHER_S = 1.0  # between the first report of a wait and the line about it: others report theirs meanwhile


class FailureDetector:
    """The detector of failures that no rank reports.

    Args:
        links: the ranks that have come up; the caller adds those that follow.
        ending: is told of failures.
        trace: asks for the ranks' time now and then, or None.
        say: writes a line of the launcher's own.
    """

    def __init__(
        self,
        links: Mapping[int, ranks.RankLink],
        ending: Ending,
        trace: TraceFile | None,
        say: Callable[[str], None],
    ) -> None:
        self._links = links
        self._ending = ending
        self._trace = trace
        self._say = say
        self._looked_s = time.monotonic()
        self._stall_report_s = math.inf

    @property
    def deadlines_s(self) -> list[float]:
        """Returns the monotonic times at which to look again at the latest."""
        deadlines_s = [self._looked_s + HEARTBEAT_S]
        for link in self._links.values():
            if link.stopped_s is not None and link.freeze_s:
                deadlines_s.append(link.stopped_s + link.freeze_s)
        return deadlines_s

    def expect_stalls(self) -> None:
        """Notes that a rank has reported a wait: a line about all that wait follows soon."""
        self._stall_report_s = min(self._stall_report_s, time.monotonic() + STALL_GATHER_S)

    def look(self) -> None:
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
            failure = link.find_freeze(now_s, SILENCE_S)
            if failure is not None:
                # A silent worker will not report an end; a stopped script can still be killed, and that is reported.
                link.exited = link.stopped_s is None
                link.freeze_s = 0.0
                self._ending.fail(failure)
                link.send_signal(signal.SIGKILL)  # no other signal reaches a stopped process
        waiting = next((link.rank for link in self._links.values() if link.joining and not link.exited), None)
        for rank, link in self._links.items():
            # One that has ended in wh.init, too: who waits for it there is told nothing before MPI has connected all.
            if waiting is not None and link.code == 0 and link.joining is not False and not self._ending.has_begun:
                self._ending.fail(ranks.make_absent_failure(rank, waiting, called=link.joining is not None))
        if now_s >= self._stall_report_s:
            self._stall_report_s = math.inf
            self._say(stalls.report_stalls(self._links, now_s))
