"""Counts what this process has done so far, for `whale run --logdir` and `--metrics-port`: growing sums, and memory."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from whale_ops import Communicator
from whale_ops.communicator import COPIED

_T = TypeVar("_T")
_NAME_LIMIT = 100  # characters of a program's name: a session's run bears those of all its fetches
_PAGE_BYTES = resource.getpagesize()


class StepProgress:
    """Counts the steps of this process, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[str, tuple[int, float]] = {}
        self._told: dict[str, Any] = {}
        self._begun_ns = time.monotonic_ns()

    def count_steps(self, call: Callable[..., _T], name: str) -> Callable[..., _T]:
        """Returns the same callable, whose calls are counted under the program's name."""
        name = name[:_NAME_LIMIT]

        def run_counted(*args: Any) -> _T:
            start_s = time.perf_counter()
            result = call(*args)
            taken_s = time.perf_counter() - start_s
            with self._lock:
                calls, seconds = self._programs.get(name, (0, 0.0))
                self._programs[name] = calls + 1, seconds + taken_s
            return result

        return run_counted

    def take_news(self, comm: Communicator | None) -> dict[str, Any] | None:
        """Returns all sums in the form of `whale.launcher.protocol.Progress`; None if no step ran since they were last
        asked for.
        """
        with self._lock:
            programs = dict(self._programs)
        if programs == self._told:
            return None
        self._told = programs
        counters = comm.counters() if comm is not None else []
        exchanged = [c for c in counters if not c.key.startswith(COPIED)]
        return {
            "begun_ns": self._begun_ns,
            "programs": programs,
            "logical_bytes": sum(c.logical_bytes for c in exchanged),
            "sent_bytes": sum(c.wire_bytes for c in counters),
            "waiting_s": sum(c.waiting_seconds for c in counters),
            "memory_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
