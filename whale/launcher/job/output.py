"""Writes what the ranks print as whole lines, each with its rank in front."""

from __future__ import annotations

import collections
import functools
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from whale.quiet import others

# A line ends with \n, or with the \r that a progress bar returns to the start of its line with.
# A \r at the end of what has arrived may be the first half of \r\n: it waits.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)(?!\Z)")
IDLE_S = 0.1
SHOWN = 1000  # times in a second that a rank's line on stderr is shown; more are counted
_DISTINCT = 64  # lines of a rank that are remembered for that
_COUNT_EVERY_S = 10.0
_COLOURS = (b"36", b"33", b"35", b"32", b"34", b"31", b"96", b"93", b"95", b"92", b"94", b"91")


@dataclass(slots=True)
class _PendingText:
    """The text that a rank has written to one stream since its last line end."""

    data: bytearray = field(default_factory=bytearray)
    since_s: float = 0.0


@dataclass(slots=True)
class _Cursor:
    """The state of an output device: who wrote last, whether that line is open, and whose open lines were ended."""

    owner: tuple[int, int] | None = None
    ended_with: bytes = b"\n"
    interrupted: set[tuple[int, int]] = field(default_factory=set)

    def interrupt(self) -> bytes:
        """Returns what ends the line that is open, if one is, and notes whose it was."""
        if self.ended_with == b"" and self.owner is not None:
            self.interrupted.add(self.owner)
        return b"" if self.ended_with == b"\n" else b"\n"


class _RepeatFilter:
    """The filter of lines that one rank writes to stderr over and over, which are counted.

    What a library says of a descriptor that was closed under it comes thousands of times a second.
    """

    def __init__(self) -> None:
        self._seen: collections.OrderedDict[int, tuple[float, int]] = collections.OrderedDict()
        self._counted = 0
        self._said_s = time.monotonic()

    def filter_lines(self, lines: list[bytes]) -> list[bytes]:
        """Returns the lines to write, now and then with a line about those that were left out."""
        found, now_s = [], time.monotonic()
        for line in lines:
            known = hash(line)
            since_s, times = self._seen.pop(known, (now_s, 0))
            since_s, times = (now_s, 1) if now_s >= since_s + 1.0 else (since_s, times + 1)
            self._seen[known] = since_s, times
            if len(self._seen) > _DISTINCT:
                self._seen.popitem(last=False)
            if times <= SHOWN or not line.strip():
                found.append(line)
            else:
                self._counted += 1
        if self._counted and now_s >= self._said_s + _COUNT_EVERY_S:
            found += self.take_rest()
        return found

    def take_rest(self) -> list[bytes]:
        """Returns a line about the lines left out since the last such line."""
        counted, self._counted, self._said_s = self._counted, 0, time.monotonic()
        text = f"whale run: {counted:,} more lines like those above, of which each came {SHOWN} times in a second\n"
        return [text.encode()] if counted else []


class Printer:
    """The printer that interleaves the ranks' streams on this process's stdout and stderr without mixing lines.

    A line is written when it is complete; a part of a line when nothing followed it for `IDLE_S` seconds, or when it
    is longer than `part_limit_bytes`. When another rank writes while a line is open, the line is ended first.

    A line that a rank writes to stderr more than `SHOWN` times in a second is counted, and not repeated.

    Args:
        size: number of ranks, for the width of the prefix.
        verbose: show TensorFlow's start-up lines.
        outputs: file descriptors for the ranks' stdout and stderr.
        colour: write each prefix in the rank's colour.
    """

    part_limit_bytes = 1 << 20

    def __init__(
        self, size: int, outputs: Sequence[int] = (1, 2), *, colour: bool | None = None, verbose: bool = True
    ) -> None:
        self._outputs, self._verbose = outputs, verbose
        self._pending: dict[tuple[int, int], _PendingText] = {}
        self._repeats = collections.defaultdict[int, _RepeatFilter](_RepeatFilter)
        width = len(str(size - 1))
        colours = [
            os.isatty(output) and "NO_COLOR" not in os.environ if colour is None else colour for output in outputs
        ]
        self._prefix = functools.cache(lambda stream, rank: _format_prefix(rank, width, colours[stream]))
        # A terminal that shows both streams has one cursor, two files have two.
        devices = [_find_device(output) for output in outputs]
        cursors = {device: _Cursor() for device in devices}
        self._cursors = [cursors[device] for device in devices]

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Takes bytes that a rank wrote to its stdout (stream 0) or stderr (stream 1)."""
        pending = self._pending.setdefault((rank, stream), _PendingText())
        # Only what is new can hold a line end, but for a \r that waited.
        unseen = max(0, len(pending.data) - 1)
        pending.data += data
        pending.since_s = time.monotonic()
        start = 0
        lines = []
        for line_end in _LINE_END.finditer(pending.data, unseen):
            lines.append(bytes(pending.data[start : line_end.end()]))
            start = line_end.end()
        del pending.data[:start]
        if stream == 1:
            lines = self._repeats[rank].filter_lines(lines if self._verbose else others(lines))
        self._emit(rank, stream, lines)
        if len(pending.data) > self.part_limit_bytes:
            self._flush(rank, stream)

    def write_lines(self, rank: int, stream: int, text: str) -> None:
        """Writes a text of whole lines for a rank, after all that it has printed before."""
        self.flush_rank(rank)
        self._emit(rank, stream, [line.encode(errors="replace") + b"\n" for line in text.splitlines()])

    def say(self, text: str) -> None:
        """Writes lines of the launcher's own to stderr."""
        cursor = self._cursors[1]
        start = cursor.interrupt()
        cursor.owner, cursor.ended_with = None, b"\n"
        _write_all(self._outputs[1], start + text.encode(errors="replace") + b"\n")

    def flush_idle(self) -> None:
        """Writes the parts of lines that have waited long enough."""
        limit_s = time.monotonic() - IDLE_S
        for (rank, stream), pending in self._pending.items():
            if pending.data and pending.since_s <= limit_s:
                self._flush(rank, stream)

    def flush_rank(self, rank: int) -> None:
        """Writes all that a rank has printed, complete lines or not."""
        for stream in range(len(self._outputs)):
            self._flush(rank, stream)

    @property
    def has_pending(self) -> bool:
        """Tells whether parts of lines wait for `flush_idle`."""
        return any(pending.data for pending in self._pending.values())

    def close(self) -> None:
        """Writes everything that is left and ends open lines."""
        for rank, stream in self._pending:
            self._flush(rank, stream)
        for rank, repeats in self._repeats.items():
            self._emit(rank, 1, repeats.take_rest())
        for output, cursor in zip(self._outputs, self._cursors):
            if cursor.ended_with != b"\n":
                _write_all(output, b"\n")
                cursor.ended_with = b"\n"

    def _flush(self, rank: int, stream: int) -> None:
        pending = self._pending.get((rank, stream))
        if pending is not None and pending.data:
            data = bytes(pending.data)
            pending.data.clear()
            self._emit(rank, stream, [data])

    def _emit(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not lines:
            return
        cursor, source = self._cursors[stream], (rank, stream)
        parts = []
        for line in lines:
            if source in cursor.interrupted:
                cursor.interrupted.remove(source)
                if line in (b"\n", b"\r\n"):
                    continue  # of a line that another rank's has ended already
            if cursor.ended_with == b"" and cursor.owner == source:
                parts.append(line)  # the rest of a line that was written in part
            else:
                # An open line, or one that a progress bar will write over, is kept from other ranks.
                if cursor.owner != source:
                    parts.append(cursor.interrupt())
                parts += (self._prefix(stream, rank), line)
            cursor.owner = source
            cursor.ended_with = line[-1:] if line[-1:] in (b"\n", b"\r") else b""
        _write_all(self._outputs[stream], b"".join(parts))


def _format_prefix(rank: int, width: int, coloured: bool) -> bytes:
    text = b"[%*d]" % (width, rank)
    return b"\x1b[%sm%s\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], text) if coloured else text + b" "


def _find_device(output: int) -> tuple[int, int, int]:
    status = os.fstat(output)
    return status.st_dev, status.st_ino, status.st_rdev


def _write_all(output: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(output, view) :]
