"""Acts on the frames of workers: output to show, failures and ends, waits, pieces of the trace."""

from __future__ import annotations

import time

from whale.launcher.job import ranks
from whale.launcher.job.ending import Ending
from whale.launcher.job.failure_detector import FailureDetector
from whale.launcher.job.output import Printer
from whale.launcher.job.progress import RunProgress
from whale.launcher.job.trace import TraceFile
from whale.launcher.protocol import ExitStatus, FrameKind, RaisedReport, ScriptMessage, StopReport, unpack

_HIDDEN_BYTES = 1 << 18
_STREAM_OF = {FrameKind.STDOUT: 0, FrameKind.STDERR: 1}


class ReportHandler:
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
        lookout: FailureDetector,
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
        failure = ranks.make_exit_failure(rank, status)
        if failure is None:
            # Ranks to which it has said good-bye know it better.
            self._ending.tell_others(rank, "has ended without wh.shutdown (exit code 0)")
        elif not link.raised:
            self._ending.fail(failure)

    def _take_message(self, link: ranks.RankLink, rank: int, message: ScriptMessage) -> None:
        link.take(message)
        if self._progress is not None:
            if message.progress is not None:
                self._progress.take(rank, message.progress)
            if message.plan is not None:
                self._progress.take_plan(rank, message.plan["name"], message.plan["text"])
        if message.stall is not None and not self._ending.has_begun:
            link.stall = message.stall
            self._lookout.expect_stalls()
