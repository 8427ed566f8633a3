"""Detects ranks that are frozen or that wait for a rank that will never come, and prints who waits for whom."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping

from whale.launcher.job import ranks
from whale.launcher.job.ending import Ending
from whale.launcher.job.ranks import RankLink
from whale.launcher.job.trace import TraceFile
from whale.launcher.protocol import HEARTBEAT_S

SILENCE_S = 4 * HEARTBEAT_S  # heartbeats may be late by that much, however short fault.freeze_s is
STALL_GATHER_S = 1.0  # between the first report of a wait and the line about it: others report theirs meanwhile


class FailureDetector:
    """Detects failures that no rank reports: frozen processes, silent hosts, and ranks that are waited for in vain.

    Args:
        links: the connections of the ranks; the caller adds those that connect later.
        ending: receives the failures.
        trace: the trace, whose clock offsets are refreshed from here, or None.
        say: prints a line of the launcher's own.
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
        """Returns the monotonic times at which the event loop has to call `look` at the latest."""
        deadlines_s = [self._looked_s + HEARTBEAT_S]
        for link in self._links.values():
            if link.stopped_s is not None and link.freeze_s:
                deadlines_s.append(link.stopped_s + link.freeze_s)
        return deadlines_s

    def expect_stalls(self) -> None:
        """Notes that a rank has reported a long wait; `look` prints one line about all waits `STALL_GATHER_S` seconds
        later.
        """
        self._stall_report_s = min(self._stall_report_s, time.monotonic() + STALL_GATHER_S)

    def look(self) -> None:
        """Looks for ranks that are frozen or missing in ``wh.init``, and prints reported waits; the event loop calls it
        often.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * HEARTBEAT_S:
            # The launcher itself was stopped, or blocked by a reader of its output: the ranks' silence means nothing.
            for link in self._links.values():
                link.heard_s = now_s
        self._looked_s = now_s
        if self._trace is not None:
            self._trace.look_after(self._links.values())
        for link in self._links.values():
            failure = link.find_freeze(now_s, SILENCE_S)
            if failure is not None:
                # A silent worker will not report its script's end; that of a stopped script will, when it is killed.
                link.exited = link.stopped_s is None
                link.freeze_s = 0.0
                self._ending.fail(failure)
                link.send_signal(signal.SIGKILL)  # no other signal reaches a stopped process
        waiting = next((link.rank for link in self._links.values() if link.joining and not link.exited), None)
        for rank, link in self._links.items():
            # Also for a rank that ended inside wh.init: until MPI has connected all ranks, nobody tells the others.
            if waiting is not None and link.code == 0 and link.joining is not False and not self._ending.has_begun:
                self._ending.fail(ranks.make_absent_failure(rank, waiting, called=link.joining is not None))
        if now_s >= self._stall_report_s:
            self._stall_report_s = math.inf
            self._say(report_stalls(self._links, now_s))


def report_stalls(links: Mapping[int, RankLink], now_s: float) -> str:
    """Formats the ranks' reports of their longest waits as text, and clears the reports.

    For example::

        ranks 0 and 2 have waited 60 s in AllReduce 'dense/kernel' for rank 1
          rank 1 (node2) is running, but waits in no operation; look at what its script does

    Args:
        links: the connections of all ranks, which hold the reports.
        now_s: monotonic time.
    """
    waits: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    longest_s: dict[tuple[str, tuple[int, ...]], float] = {}
    for rank, link in sorted(links.items()):
        if link.stall is not None:
            key = link.stall["what"], tuple(link.stall["missing"])
            waits.setdefault(key, []).append(rank)
            longest_s[key] = max(longest_s.get(key, 0.0), link.stall["seconds"])
            link.stall = None
    waiting = {rank for members in waits.values() for rank in members}
    lines = [
        f"{_format_ranks(members)} {'has' if len(members) == 1 else 'have'} waited {longest_s[key]:.0f} s in {key[0]}"
        + (f" for {_format_ranks(key[1])}" if key[1] else "")
        for key, members in waits.items()
    ]
    for rank in sorted({rank for _, missing in waits for rank in missing} - waiting):
        if rank in links:
            lines.append(f"  rank {rank} {_format_state(links[rank], now_s)}")
    return "\n".join(lines)


def _format_ranks(numbers: tuple[int, ...] | list[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _format_state(link: RankLink, now_s: float) -> str:
    if link.exited:
        return f"({link.host}) has ended"
    if link.stopped_s is not None:
        return f"({link.host}) has been stopped for {now_s - link.stopped_s:.0f} s; continue its process, or end it"
    if link.joining is not False:
        return f"({link.host}) is running, but has not finished wh.init"
    return f"({link.host}) is running, but waits in no operation; look at what its script does"
