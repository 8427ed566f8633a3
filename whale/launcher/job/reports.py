"""Acts on the frames of workers: output to show, failures and ends, waits, pieces of the trace."""

from __future__ import annotations

import time

from whale.launcher.job import ranks
from whale.launcher.job.ending import Ending
from whale.launcher.job.failure_detector import Lookout
from whale.launcher.job.output import Printer
from whale.launcher.job.progress import RunProgress
from whale.launcher.job.trace import TraceFile
from whale.launcher.protocol import Exit, FromScript, Kind, Raised, Stopped, unpack

_HIDDEN_BYTES = 1 << 18
_STREAM_OF = {Kind.STDOUT: 0, Kind.STDERR: 1}


class Reports:
    """The handler of frames from ranks that have come up.

    Args:
        printer: shows what they print.
        ending: is told how they end.
        lookout: is told when they wait.
        trace: takes their events, or None.
        progress: takes what they tell of their steps, or None.
        verbose: whether what they write to stderr is shown while the run is being ended too.
    """

    def __init__(
        self,
        printer: Printer,
        ending: Ending,
        lookout: Lookout,
        trace: TraceFile | None,
        progress: RunProgress | None,
        verbose: bool,
    ) -> None:
        self._printer = printer
        self._ending = ending
        self._lookout = lookout
        self._trace = trace
        self._progress = progress
        self._verbose = verbose

    def take(self, link: ranks.RankLink, rank: int, kind: Kind, payload: bytes) -> None:
        """Acts on one frame of a rank.

        Raises:
            ValueError: no worker sends this.
        """
        if kind in _STREAM_OF:
            # After the first failure, or when being stopped, the ranks complain about exactly that.
            if kind is Kind.STDERR and self._ending.begun and not self._verbose:
                link.hidden += payload[: _HIDDEN_BYTES - len(link.hidden)]
            else:
                self._printer.write(rank, _STREAM_OF[kind], payload)
        elif kind is Kind.FAILURE:
            link.raised = True
            self._ending.fail(ranks.raised(rank, unpack(payload, Raised)))
        elif kind is Kind.EXIT:
            self._take_exit(link, rank, unpack(payload, Exit))
        elif kind is Kind.DEAF and link.joining is False:  # else it may have become another program
            self._ending.fail(ranks.closed(rank))
        elif kind is Kind.STOPPED:
            link.stopped_s = time.monotonic() if unpack(payload, Stopped).stopped else None
        elif kind is Kind.SCRIPT:
            self._take_message(link, rank, unpack(payload, FromScript))
        elif kind in (Kind.CLOCK, Kind.TRACE) and self._trace is not None:
            self._trace.take(link, kind, payload)

    def _take_exit(self, link: ranks.RankLink, rank: int, status: Exit) -> None:
        link.exited, link.stopped_s = True, None
        self._printer.flush_rank(rank)
        link.code = status.code
        failure = ranks.ended(rank, status)
        if failure is None:
            # Ranks to which it has said good-bye know it better.
            self._ending.tell_others(rank, "has ended without wh.shutdown (exit code 0)")
        elif not link.raised:
            self._ending.fail(failure)

    def _take_message(self, link: ranks.RankLink, rank: int, message: FromScript) -> None:
        link.take(message)
        if self._progress is not None:
            if message.progress is not None:
                self._progress.take(rank, message.progress)
            if message.plan is not None:
                self._progress.take_plan(rank, message.plan["name"], message.plan["text"])
        if message.stall is not None and not self._ending.begun:
            link.stall = message.stall
            self._lookout.expect_stalls()
