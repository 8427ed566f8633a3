"""Prints the output of all ranks as whole lines, each with its rank in front."""

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
# A \r at the end of what has arrived may be the first half of \r\n, so it is not taken for a line end yet.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)(?!\Z)")
IDLE_S = 0.1
SHOWN = 1000  # how often per second the same line of a rank's stderr is printed; further ones are counted
_DISTINCT = 64  # different lines of a rank that are remembered to recognise repetitions
_COUNT_EVERY_S = 10.0
_COLOURS = (b"36", b"33", b"35", b"32", b"34", b"31", b"96", b"93", b"95", b"92", b"94", b"91")


@dataclass(slots=True)
class _PendingText:
    """Holds what a rank has written to one stream since its last line end."""

    data: bytearray = field(default_factory=bytearray)
    since_s: float = 0.0


@dataclass(slots=True)
class _Cursor:
    """Tracks the cursor of an output device: who wrote last, whether that line is unfinished, and whose lines were cut
    off.

    Attributes:
        owner: (rank, stream) of the last writer; None: the launcher itself.
        ended_with: the last line end, newline or carriage return; b"": the line is unfinished.
        interrupted: the (rank, stream) whose unfinished lines were ended to let another rank write.
    """

    owner: tuple[int, int] | None = None
    ended_with: bytes = b"\n"
    interrupted: set[tuple[int, int]] = field(default_factory=set)

    def interrupt(self) -> bytes:
        """Returns the bytes that end an unfinished line, b"" if there is none, and notes whose line it was."""
        if self.ended_with == b"" and self.owner is not None:
            self.interrupted.add(self.owner)
        return b"" if self.ended_with == b"\n" else b"\n"


class _RepeatFilter:
    """Filters lines that one rank writes to stderr over and over; these are counted instead of printed.

    Some libraries write thousands of lines a second, for example about a file descriptor that was closed under them.
    """

    def __init__(self) -> None:
        self._seen: collections.OrderedDict[int, tuple[float, int]] = collections.OrderedDict()
        self._counted = 0
        self._said_s = time.monotonic()

    def filter_lines(self, lines: list[bytes]) -> list[bytes]:
        """Returns the lines to print, and about every `_COUNT_EVERY_S` seconds a line with the number of those left
        out.
        """
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
        """Returns one line with the number of lines left out since the last such line; [] if there were none."""
        counted, self._counted, self._said_s = self._counted, 0, time.monotonic()
        text = f"whale run: {counted:,} more lines like those above, of which each came {SHOWN} times in a second\n"
        return [text.encode()] if counted else []


class Printer:
    """Merges the output streams of all ranks into the launcher's stdout and stderr without mixing lines.

    A line is printed when it is complete. An unfinished line is printed when nothing has followed it for `IDLE_S`
    seconds, or when it is longer than `part_limit_bytes`. If another rank prints while a line is unfinished, that line
    is ended first. A line that a rank writes to stderr more than `SHOWN` times in a second is counted instead of
    repeated.

    Args:
        size: number of ranks, for the width of the prefix.
        outputs: file descriptors to which the ranks' stdout and stderr go.
        colour: whether to print each prefix in the rank's colour; None: if the output is a terminal and NO_COLOR is not
          set.
        verbose: whether to print TensorFlow's start-up lines.
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
        """Takes bytes that a rank has written to stdout (stream 0) or stderr (stream 1), and prints the lines they
        complete.
        """
        pending = self._pending.setdefault((rank, stream), _PendingText())
        # Only the new bytes can contain a line end, or the \r at the end of the old ones.
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
        """Prints whole lines on behalf of a rank, after everything that the rank has written before; for example a
        traceback.
        """
        self.flush_rank(rank)
        self._emit(rank, stream, [line.encode(errors="replace") + b"\n" for line in text.splitlines()])

    def say(self, text: str) -> None:
        """Prints lines of the launcher's own to stderr, without a rank in front."""
        cursor = self._cursors[1]
        start = cursor.interrupt()
        cursor.owner, cursor.ended_with = None, b"\n"
        _write_all(self._outputs[1], start + text.encode(errors="replace") + b"\n")

    def flush_idle(self) -> None:
        """Prints unfinished lines to which nothing was added for `IDLE_S` seconds."""
        limit_s = time.monotonic() - IDLE_S
        for (rank, stream), pending in self._pending.items():
            if pending.data and pending.since_s <= limit_s:
                self._flush(rank, stream)

    def flush_rank(self, rank: int) -> None:
        """Prints everything that a rank has written so far, including unfinished lines."""
        for stream in range(len(self._outputs)):
            self._flush(rank, stream)

    @property
    def has_pending(self) -> bool:
        """Returns True if there are unfinished lines that `flush_idle` may have to print later."""
        return any(pending.data for pending in self._pending.values())

    def close(self) -> None:
        """Prints everything that is left, and ends unfinished lines."""
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
                    continue  # this line was ended before, to let another rank print
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
