"""Writes what this process spends its time on as events in Chrome's trace format: steps, compilations, batches,
exchanges.

Each event is one line, written at once, so that the events before a crash are kept. The lines go to a pipe, from which
the worker of `whale run --trace` passes them on to the launcher, or to the file that the key ``debug.trace`` names. The
op library writes its exchanges to the same place (``Communicator.trace_start``).

Decision: 0007.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from whale.config import Config
from whale.errors import ConfigError
from whale.log import log
from whale.started import TRACE_PIPE_VARIABLE, ProcessPlace, own_descriptor

_T = TypeVar("_T")
_WAITING_LINES = 10_000  # lines that are kept while the pipe is full; further ones are dropped and counted
_FIRST_TRACK = 1  # track of the script's main thread; the op library's tracks begin at 100
_NAME_LIMIT = 256  # characters, so that a pipe takes a whole line at once


class Trace:
    """Writes the events of this process's ranks, from construction to ``stop``. Thread-safe.

    If one process runs several ranks, what the script does is written once for each of them.

    Args:
      descriptor: file descriptor to write to; `stop` closes it if it is a file.
      ranks: the ranks of this process.
      is_file: whether the descriptor is a file, which becomes a JSON array; False: the launcher's pipe.
    """

    def __init__(self, descriptor: int, ranks: Sequence[int], is_file: bool) -> None:
        self.descriptor = descriptor
        self._ranks, self._is_file = ranks, is_file
        self._lock = threading.Lock()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._lost = 0
        self._broken = False
        self._tracks: dict[int, int] = {}
        self._calls: collections.Counter[str] = collections.Counter()
        if is_file:
            os.write(descriptor, b"[\n")
        for rank in ranks:
            self._write(
                {"name": "process_name", "ph": "M", "args": {"name": f"rank {rank} ({socket.gethostname()})"}}, rank
            )
            self._write({"name": "process_sort_index", "ph": "M", "args": {"sort_index": rank}}, rank)

    @contextlib.contextmanager
    def open_span(self, name: str, category: str, **arguments: Any) -> Iterator[None]:
        """Writes an event that lasts as long as the context is open.

        The start is written at once, so that an event that never ends is seen as well.

        Args:
          name: name of the event.
          category: such as "step" or "input".
          arguments: further details to be shown with it.
        """
        start: dict[str, Any] = {"args": arguments} if arguments else {}
        self._write_event(name, "B", cat=category, **start)
        end: dict[str, Any] = {}
        try:
            yield
        except BaseException as error:
            end["args"] = {"error": f"{type(error).__name__}: {error}"[:_NAME_LIMIT]}
            raise
        finally:
            self._write_event(name, "E", **end)

    def write_past(self, name: str, category: str, start_ns: int, end_ns: int) -> None:
        """Writes an event that is over; its times are in nanoseconds of the monotonic clock."""
        self._write_event(name, "X", start_ns, cat=category, dur=(end_ns - start_ns) / 1e3)

    def mark(self, name: str) -> None:
        """Writes an event without duration, at the present time."""
        self._write_event(name, "i", s="p")

    def trace_steps(self, call: Callable[..., _T], name: str, program: int) -> Callable[..., _T]:
        """Wraps a callable so that each call is an event, named by the step and its number, such as "train_step 3".

        Args:
          call: the callable.
          name: name of the step; calls are numbered per name.
          program: number of the program, shown with the event.
        """

        def run_traced(*args: Any) -> _T:
            number = self._calls[name]
            self._calls[name] += 1
            with self.open_span(f"{name} {number}", "step", number=number, program=program):
                return call(*args)

        return run_traced

    def trace_batches(self, elements: Iterator[_T]) -> Iterator[_T]:
        """Yields the elements of an iterator; the time that each takes to arrive is an event."""
        end = object()
        while True:
            with self.open_span("next batch", "input"):
                element = next(elements, end)
            if element is end:
                return
            yield element  # type: ignore[misc]

    def stop(self, reason: str) -> None:
        """Writes a last event, which says why the trace ends; nothing may be written afterwards."""
        self._write_event(reason, "i", s="p", last=True)
        if self._is_file:
            os.close(self.descriptor)

    def _write_event(
        self, name: str, phase: str, when_ns: int | None = None, last: bool = False, **fields: Any
    ) -> None:
        when_us = (time.monotonic_ns() if when_ns is None else when_ns) / 1e3
        track = _FIRST_TRACK if phase == "i" else self._find_track()
        for rank in self._ranks:
            self._write({"name": name[:_NAME_LIMIT], "ph": phase, "ts": when_us, "tid": track, **fields}, rank, last)

    def _find_track(self) -> int:
        """Returns the number of the calling thread's track in the trace; a thread's first call creates and names its
        track.
        """
        thread = threading.get_ident()
        track = self._tracks.get(thread)
        if track is None:
            with self._lock:
                track = self._tracks[thread] = _FIRST_TRACK + len(self._tracks)
            name = "steps" if track == _FIRST_TRACK else f"steps, thread {track}"
            for rank in self._ranks:
                self._write({"name": "thread_name", "ph": "M", "tid": track, "args": {"name": name}}, rank)
        return track

    def _write(self, event: dict[str, Any], rank: int, last: bool = False) -> None:
        end = b"\n]\n" if last and self._is_file and rank == self._ranks[-1] else b",\n"
        line = json.dumps({**event, "pid": rank}).encode() + end
        with self._lock:
            if len(self._waiting) < _WAITING_LINES:
                self._waiting.append(line)
            else:
                self._lost += 1
            try:
                while self._waiting:
                    os.write(self.descriptor, self._waiting[0])
                    self._waiting.popleft()
                    if self._lost and not self._waiting:
                        lost = {**event, "name": f"{self._lost} events lost", "ph": "i", "s": "p", "pid": rank}
                        self._waiting.append(json.dumps(lost).encode() + b",\n")
                        self._lost = 0
            except BlockingIOError:
                pass  # the pipe is full: the waiting lines are written with the next event
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stops tracing with a warning, since an error such as a full disk must not end the training."""
        self._waiting.clear()
        if not self._broken:
            self._broken = True
            log.warning(f"the trace is incomplete from here on: {error}")


def open_trace(config: Config, place: ProcessPlace, ranks: Sequence[int], run: int) -> Trace | None:
    """Opens the trace of this process; None if no trace was asked for.

    Args:
      config: the configuration, for the key ``debug.trace``.
      place: the place of this process among the ranks.
      ranks: the ranks of this process.
      run: number of times that Whale was started in this process, from 1; each has a file of its own.

    Raises:
      ConfigError: the file cannot be written, or ``whale run --trace`` and ``debug.trace`` both ask for a trace.
    """
    pipe, asked = own_descriptor(TRACE_PIPE_VARIABLE), config["debug.trace"]
    if pipe is not None and asked:
        raise ConfigError(
            "two traces are asked for",
            given=f"whale run --trace, and debug.trace = {asked!r} ({config.origin('debug.trace')})",
            expected="one of them: --trace makes one file of all ranks, the key one file for each process",
            action="start `whale run` without --trace, or remove the key debug.trace",
        )
    if pipe is not None:
        return Trace(pipe, ranks, is_file=False)
    if not asked:
        return None
    path = find_path(asked, place, run)
    try:
        # Appending, so that lines of several threads do not overwrite each other.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            "the trace cannot be written",
            given=f"debug.trace = {asked!r} ({config.origin('debug.trace')})",
            reason=error,
            expected="the path of a file in a folder that exists, on every host",
            action="set debug.trace to the path of a file in a folder that exists and can be written to",
        ) from error
    return Trace(descriptor, ranks, is_file=True)


def find_path(asked: str, place: ProcessPlace, run: int) -> Path:
    """Returns the path of this process's trace file, derived from the value of ``debug.trace``.

    For "trace.json": ``trace.json`` with one process, ``trace.rank1.json`` with several, ``trace.run2.json`` if Whale
    was started a second time.

    Args:
      asked: the value of ``debug.trace``.
      place: the place of this process among the ranks.
      run: number of times that Whale was started in this process, from 1.
    """
    path = Path(asked)
    rank = f".rank{place.rank}" if place.size > 1 else ""
    again = f".run{run}" if run > 1 else ""
    return path.with_name(f"{path.stem}{rank}{again}{path.suffix}")


def open_span(trace: Trace | None, name: str, category: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context during which an event lasts; it does nothing if there is no trace."""
    return contextlib.nullcontext() if trace is None else trace.open_span(name, category)
