"""Where the time of tests goes: ``python -m tests.times REPORT.xml ...`` prints it by folder, by kind, by test.

Reports are those of ``pytest --junitxml``. `tests/conftest.py` notes for each test what `Times` measures: the processor
time of the test's process, of the processes that it has started, and of those that the fork server has made for it.
"""

from __future__ import annotations

import os
import sys
import time
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tests import forkserver

KINDS = ("pure Python", "TensorFlow in the process", "processes started")
_SLOWEST = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One test: seconds on the clock and of processors, what it started, and how long it slept.

    Attributes:
        test: file and name.
        kind: of `KINDS`.
        starts: commands that the test started itself.
        forked: processes that the fork server made for it.
        sleep_s: seconds that the test's own process slept for.
    """

    test: str
    kind: str
    wall_s: float
    processor_s: float
    starts: int
    forked: int
    sleep_s: float


class Times:
    """Measures one test in its process, from its set-up to the end of its teardown."""

    def __init__(self) -> None:
        self._starts, self._sleep_s = 0, 0.0
        sys.addaudithook(self._hear)
        self._sleep = time.sleep
        time.sleep = self._note_sleep

    def begin(self) -> None:
        """Begins with nothing measured."""
        self._starts, self._sleep_s = 0, 0.0
        self._begin_s = _processor_s()

    def end(self, test: str, module: ModuleType | None) -> dict[str, object]:
        """Returns what was measured since `begin`, as properties of a report."""
        forked = [one["processor_s"] for one in forkserver.usage_of(test)]
        started = self._starts > 0
        kind = KINDS[2] if started else KINDS[1] if uses_tensorflow(module) else KINDS[0]
        return {
            "kind": kind,
            "processor_s": round(_processor_s() - self._begin_s + sum(forked), 3),
            "starts": self._starts,
            "forked": len(forked),
            "sleep_s": round(self._sleep_s, 3),
        }

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"):
            self._starts += event != "os.exec"

    def _note_sleep(self, seconds: Any, /) -> None:
        self._sleep_s += seconds
        self._sleep(seconds)


def _processor_s() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def uses_tensorflow(module: ModuleType | None) -> bool:
    """Tells whether a test's module, or one of ours that it refers to, refers to TensorFlow or Keras."""
    return _refers_to(module, {"tensorflow", "keras", "tf_keras"}, ("tests", "whale", "whale_ops", "cost_model"))


def starts_processes(module: ModuleType | None) -> bool:
    """Tells whether a test's module, or one of the tests' that it refers to, can start processes."""
    return _refers_to(module, {"subprocess"}, ("tests",))


def _refers_to(module: ModuleType | None, packages: Collection[str], through: Collection[str]) -> bool:
    seen: set[str] = set()
    waiting = [] if module is None else [module]
    while waiting:
        for value in list(vars(waiting.pop()).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(value, (ModuleType, FunctionType, type)) and isinstance(name, str) and name not in seen:
                seen.add(name)
                first = name.partition(".")[0]
                if first in packages:
                    return True
                if first in through and name in sys.modules:
                    waiting.append(sys.modules[name])
    return False


def read(paths: Iterable[str]) -> list[Row]:
    """Reads reports of ``pytest --junitxml``."""
    rows = []
    for path in paths:
        for case in xml.parse(path).iter("testcase"):
            said = {one.get("name"): one.get("value", "") for one in case.iter("property")}
            if case.find("skipped") is not None:
                continue
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            wall_s = float(case.get("time", 0))
            rows.append(
                Row(
                    test,
                    said.get("kind", "unknown"),
                    wall_s,
                    float(said.get("processor_s", wall_s)),
                    int(said.get("starts", 0)),
                    int(said.get("forked", 0)),
                    float(said.get("sleep_s", 0)),
                )
            )
    return rows


def table(title: str, rows: Iterable[Row], key: Callable[[Row], str]) -> str:
    """A Markdown table of sums, the largest first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    lines = [f"| {title} | tests | wall s | processor s | starts | forked | slept s |", "|---|---|---|---|---|---|---|"]
    sums = {
        name: (
            len(found),
            sum(r.wall_s for r in found),
            sum(r.processor_s for r in found),
            sum(r.starts for r in found),
            sum(r.forked for r in found),
            sum(r.sleep_s for r in found),
        )
        for name, found in groups.items()
    }
    for name, (count, wall, cpu, starts, forked, slept) in sorted(sums.items(), key=lambda item: -item[1][1]):
        lines.append(f"| {name} | {count} | {wall:.1f} | {cpu:.1f} | {starts} | {forked} | {slept:.1f} |")
    return "\n".join(lines)


def _folder(row: Row) -> str:
    parts = Path(row.test.partition("::")[0]).parts[:-1]
    return "/".join(parts[: 3 if parts[1:2] in (("runtime",), ("whale_ops",), ("frontends",), ("passes",)) else 2])


def main() -> None:
    """Prints the tables."""
    if not sys.argv[1:]:
        sys.exit("usage: python -m tests.times REPORT.xml ... (of pytest --junitxml=REPORT.xml)")
    rows = read(sys.argv[1:])
    print(table("all", rows, lambda row: "all"), end="\n\n")
    print(table("kind", rows, lambda row: row.kind), end="\n\n")
    print(table("folder", rows, _folder), end="\n\n")
    print(table("file", rows, lambda row: row.test.partition("::")[0]), end="\n\n")
    slowest = sorted(rows, key=lambda row: -row.wall_s)[:_SLOWEST]
    print(table("slowest tests", slowest, lambda row: row.test))


if __name__ == "__main__":
    main()
