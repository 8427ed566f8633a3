"""Writes the trace of a run: the events of all ranks in one file, in the time of the launcher's clock.

The file is a JSON array in Chrome's trace format. Events are appended as they arrive, so that the file can be opened
while the run goes on, and after the launcher was killed: viewers accept a missing closing bracket.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from whale.errors import ClusterError
from whale.launcher.job.ranks import RankLink
from whale.launcher.protocol import HEARTBEAT_S, ClockAnswer, FrameKind, unpack


class TraceFile:
    """Collects the ranks' events in the trace file, from construction to ``close``, across restarts of the run.

    Raises:
        ClusterError: the file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._zero_ns = time.monotonic_ns()
        self._separator = b"[\n"
        self._events, self._unreadable = 0, 0
        self._error: OSError | None = None
        try:
            self._file = open(path, "wb", buffering=0)
        except OSError as error:
            raise ClusterError(
                "the trace cannot be written",
                given=f"--trace {path}",
                reason=error,
                expected="the path of a file in a folder that exists",
                action="give --trace another path",
            ) from error

    def greet(self, link: RankLink) -> None:
        """Asks a rank for the time of its clock, unless the offset of that clock is known well enough."""
        if not link.clock.is_known:
            link.ask_clock()

    def look_after(self, links: Iterable[RankLink]) -> None:
        """Asks ranks on other hosts for the time of their clocks again, every `HEARTBEAT_S`, since clocks drift."""
        now_ns = time.monotonic_ns()
        for link in links:
            if not link.exited and link.clock.is_due(now_ns, HEARTBEAT_S):
                link.ask_clock()

    def take(self, link: RankLink, kind: FrameKind, payload: bytes) -> None:
        """Handles a frame of kind CLOCK (an answer about a clock) or TRACE (events).

        Events are written once the offset of the rank's clock is known.

        Raises:
            ValueError: the payload of a CLOCK frame is malformed.
        """
        if kind is FrameKind.CLOCK:
            answer = unpack(payload, ClockAnswer)
            link.clock.add(answer.asked_ns, answer.received_ns, answer.answered_ns, heard_ns=time.monotonic_ns())
            self.greet(link)
        else:
            link.trace += payload
        if link.clock.is_known:
            self._write_lines(link)

    def end(self, links: Iterable[RankLink]) -> None:
        """Writes, once the ranks have ended, events that still waited for an estimate of their clocks' offsets."""
        for link in links:
            self._write_lines(link)
            self._unreadable += link.trace.count(b"\n")

    def mark(self, rank: int, what: str) -> None:
        """Writes an instant event for a rank, at the present time."""
        when_us = (time.monotonic_ns() - self._zero_ns) / 1e3
        event = {"name": what, "ph": "i", "s": "p", "pid": rank, "tid": 1, "ts": when_us}
        self._write([json.dumps(event).encode()])

    def format_summary(self) -> str:
        """Returns a sentence for the end of the run: the number of events, where the file is, and what went wrong."""
        text = f"{self._events:,} events of the trace are in {self._path}; open it at https://ui.perfetto.dev"
        if self._unreadable:
            text += f"; {self._unreadable:,} could not be read"
        if self._error is not None:
            text += f"; then it could not be written: {self._error}"
        return text

    def close(self) -> None:
        """Closes the JSON array and the file."""
        if self._error is None:
            self._put(b"\n]\n" if self._events else b"[]\n")
        self._file.close()

    def _write_lines(self, link: RankLink) -> None:
        offset_ns = link.clock.offset_ns
        if offset_ns is None or not link.trace:
            return
        *lines, rest = bytes(link.trace).split(b"\n")
        link.trace = bytearray(rest)
        self._write(self._shift_times(lines, offset_ns + self._zero_ns))

    def _shift_times(self, lines: list[bytes], by_ns: int) -> Iterable[bytes]:
        for line in lines:
            try:
                event = msgspec.json.decode(line.decode(errors="replace").rstrip(","), type=dict[str, Any])
                if "ts" in event:
                    event["ts"] = round(event["ts"] - by_ns / 1e3, 3)
            except (msgspec.DecodeError, TypeError, RecursionError):
                self._unreadable += 1
                continue
            yield msgspec.json.encode(event)

    def _write(self, events: Iterable[bytes]) -> None:
        parts: list[bytes] = []
        for event in events:
            parts += (self._separator, event)
            self._separator = b",\n"
            self._events += 1
        if self._error is None and parts:
            self._put(b"".join(parts))

    def _put(self, data: bytes) -> None:
        """Writes bytes to the file; an error, such as a full disk, is kept for the summary and does not end the run."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError as error:
            self._error = error
