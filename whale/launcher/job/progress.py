"""Collects the ranks' reports of their steps, for TensorBoard's files, the Prometheus metrics and `whale top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from whale.launcher.job.tensorboard import EventFiles
from whale.launcher.protocol import Progress

_NONE = Progress(
    begun_ns=0,
    programs={},
    logical_bytes=0,
    sent_bytes=0,
    waiting_s=0.0,
    memory_bytes=0,
    peak_bytes=0,
    doing=None,
    wait=None,
)
# (name of the metric without "whale_", type, help text, key of `Progress`)
_PER_RANK = (
    ("logical_bytes_total", "counter", "Bytes that a rank's exchanges had to move", "logical_bytes"),
    ("sent_bytes_total", "counter", "Bytes that a rank sent", "sent_bytes"),
    ("waiting_seconds_total", "counter", "Seconds that a rank's exchanges waited for other ranks", "waiting_s"),
    ("memory_bytes", "gauge", "Resident memory of a rank's process", "memory_bytes"),
    ("memory_peak_bytes", "gauge", "The most of it so far", "peak_bytes"),
)


@dataclass(frozen=True, slots=True)
class Told:
    """Holds a rank's latest report and an earlier one to compare it with.

    Attributes:
        latest: the latest report.
        told_s: monotonic time at which it arrived.
        before: the last report with fewer steps; None if there is none.
    """

    latest: Progress
    told_s: float
    before: Progress | None


class RunProgress:
    """Keeps the latest report of each rank, across restarts. Thread-safe, since the metrics server reads it in threads.

    Args:
        files: TensorBoard's event files, to which scalars and plans are written, or None.

    Attributes:
        begun_s: monotonic time at which the run was started first.
        restarts: how often the run has been started again.
    """

    def __init__(self, files: EventFiles | None) -> None:
        self._files = files
        self._lock = threading.Lock()
        self.begun_s = time.monotonic()
        self._size = self.restarts = 0
        self._told: dict[int, Told] = {}
        self._before: dict[int, int] = {}  # rank -> steps before its present wh.init, earlier processes included
        self._up: set[int] = set()

    def begin(self, size: int, restarts: int) -> None:
        """Prepares for a start or restart of the run: no rank is up, and reports of ranks that no longer exist are
        dropped.
        """
        with self._lock:
            self._size, self.restarts = size, restarts
            self._up.clear()
            self._told = {rank: told for rank, told in self._told.items() if rank < size}

    def note_up(self, rank: int) -> None:
        """Notes that a rank's worker has connected."""
        with self._lock:
            self._up.add(rank)

    @property
    def is_complete(self) -> bool:
        """Returns True if the workers of all ranks have connected."""
        with self._lock:
            return bool(self._size) and len(self._up) == self._size

    def take(self, rank: int, told: Progress) -> None:
        """Records a rank's report and writes its scalars to TensorBoard's files.

        The sums in a report start at 0 again after a restart and after another ``wh.init``; step numbers in the files
        go on.
        """
        with self._lock:
            known = self._told.get(rank)
            before = known.latest if known is not None else _NONE
            begins = told["begun_ns"] != before["begun_ns"]
            if begins:
                self._before[rank] = self._before.get(rank, 0) + _count_steps(before)
                before, known = _NONE, None
            has_stepped = told["programs"] != before["programs"]
            earlier = None if known is None else known.latest if has_stepped else known.before
            self._told[rank] = Told(told, time.monotonic(), earlier)
        if self._files is not None and (has_stepped or begins):
            self._files.write_scalars(
                rank, self._before.get(rank, 0) + _count_steps(told), _compute_changes(before, told)
            )

    def read_ranks(self) -> dict[int, Told]:
        """Returns rank -> its latest report, for `whale top`."""
        with self._lock:
            return dict(self._told)

    def take_plan(self, rank: int, name: str, text: str) -> None:
        """Writes the plan of a program, as text, to TensorBoard's files."""
        if self._files is not None:
            self._files.write_text(rank, f"plan/{name}", text)

    def format_summary(self) -> str:
        """Returns a sentence that says where scalars and plans were written; "" if none were wanted."""
        return "" if self._files is None else self._files.format_summary()

    def format_metrics(self) -> str:
        """Returns the metrics of all ranks in Prometheus' text format."""
        with self._lock:
            size, restarts = self._size, self.restarts
            latest = {rank: told.latest for rank, told in sorted(self._told.items())}
        lines = _format_metric("ranks", "gauge", "Ranks of the run", [("", size)])
        lines += _format_metric("restarts_total", "counter", "Starts of the run after the first", [("", restarts)])
        each = [
            (f'{{rank="{rank}",program="{_escape(name)}"}}', calls, seconds)
            for rank, told in latest.items()
            for name, (calls, seconds) in told["programs"].items()
        ]
        lines += _format_metric(
            "steps_total", "counter", "Steps that have ended", [(of, calls) for of, calls, _ in each]
        )
        lines += _format_metric(
            "step_seconds_total", "counter", "Seconds inside of steps", [(of, s) for of, _, s in each]
        )
        for name, kind, what, key in _PER_RANK:
            values = [(f'{{rank="{rank}"}}', told[key]) for rank, told in latest.items()]  # type: ignore[literal-required]
            lines += _format_metric(name, kind, what, values)
        return "\n".join(lines) + "\n"


def _count_steps(told: Progress) -> int:
    return sum(calls for calls, _ in told["programs"].values())


def _compute_changes(before: Progress, told: Progress) -> dict[str, float]:
    """Returns TensorBoard's scalars, by tag, for the steps between two reports of a rank."""
    steps = _count_steps(told) - _count_steps(before)
    found: dict[str, float] = {}
    for name, (calls, seconds) in told["programs"].items():
        earlier_calls, earlier_s = before["programs"].get(name, (0, 0.0))
        if calls > earlier_calls:
            found[f"step_ms/{name}"] = 1e3 * (seconds - earlier_s) / (calls - earlier_calls)
    if steps > 0:
        found["waiting_ms_per_step"] = 1e3 * (told["waiting_s"] - before["waiting_s"]) / steps
        found["sent_KiB_per_step"] = (told["sent_bytes"] - before["sent_bytes"]) / 1024 / steps
    return found | {"memory_MiB": told["memory_bytes"] / 2**20}


def _format_metric(name: str, kind: str, what: str, values: Iterable[tuple[str, float]]) -> list[str]:
    name = f"whale_{name}"
    return [f"# HELP {name} {what}.", f"# TYPE {name} {kind}", *(f"{name}{of} {value}" for of, value in values)]


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
