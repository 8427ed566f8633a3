"""Formats what the ranks have communicated as the tables that `whale run -v` prints at the end of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from whale.launcher.protocol import Counter

TOP_KEYS = 10
TOP_RANKS = 16


@dataclass(slots=True)
class _Sum:
    """Accumulates the communication counters of several ranks or keys, for one row of a table."""

    calls: int = 0
    logical_bytes: int = 0
    wire_bytes: int = 0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    rank_s: dict[int, float] = field(default_factory=dict)

    def add(self, rank: int, counter: Counter) -> None:
        self.calls += counter["calls"]
        self.logical_bytes += counter["logical_bytes"]
        self.wire_bytes += counter["wire_bytes"]
        self.waiting_s += counter["waiting_seconds"]
        self.moving_s += counter["seconds"] - counter["waiting_seconds"]
        self.rank_s[rank] = self.rank_s.get(rank, 0.0) + counter["seconds"]

    @property
    def seconds(self) -> float:
        return self.waiting_s + self.moving_s

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = f"{self.logical_bytes / 2**20:,.3f}", f"{self.wire_bytes / 2**20:,.3f}"
        return (f"{self.calls:,}", *sizes, f"{self.waiting_s:,.3f}", f"{self.moving_s:,.3f}")

    @property
    def slowest(self) -> str:
        rank = max(self.rank_s, key=lambda rank: self.rank_s[rank])
        return f"{rank}: {self.rank_s[rank]:,.3f}"


def format_tables(counters: Mapping[int, list[Counter]], size: int, width: int) -> str:
    """Formats the counters of all ranks as three tables: by kind of operation, by key, and by rank.

    Args:
        counters: rank -> its counters; ranks that were killed are missing.
        size: number of ranks of the run.
        width: columns of the terminal.
    """
    kinds: dict[str, _Sum] = {}
    keys: dict[tuple[str, str], _Sum] = {}
    ranks: dict[int, _Sum] = {}
    for rank, entries in counters.items():
        for entry in entries:
            for of in (
                kinds.setdefault(entry["kind"], _Sum()),
                keys.setdefault((entry["kind"], entry["key"]), _Sum()),
                ranks.setdefault(rank, _Sum()),
            ):
                of.add(rank, entry)
    by_kind, by_key = (_make_table(what, "longest: rank, s") for what in (("operation",), ("operation", "key")))
    for kind, total in sorted(kinds.items(), key=lambda item: -item[1].seconds):
        by_kind.add_row(kind, *total.cells, total.slowest)
    longest = sorted(keys.items(), key=lambda item: -item[1].seconds)
    for (kind, key), total in longest[:TOP_KEYS]:
        by_key.add_row(kind, key, *total.cells, total.slowest)
    by_rank = _make_table(("rank",))
    awaited = sorted(ranks.items(), key=lambda item: item[1].waiting_s)
    for rank, total in awaited[:TOP_RANKS]:
        by_rank.add_row(str(rank), *total.cells)
    missing = [rank for rank in range(size) if rank not in counters]
    titles = (
        "communication, sums over ranks" + (f" (nothing is known of ranks {missing})" if missing else ""),
        f"the {min(TOP_KEYS, len(longest))} of {len(longest)} keys that took longest, sums over ranks",
        "by rank; in a collective the others wait for the rank that waits least",
    )
    console = Console(file=io.StringIO(), width=width)
    for title, table in zip(titles, (by_kind, by_key, by_rank)):
        console.print(title, markup=False, highlight=False)
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _make_table(names: tuple[str, ...], last: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="")
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name == "rank" else "left")
    for name in ("calls", "logical MiB", "sent MiB", "waiting s", "moving s", *((last,) if last else ())):
        table.add_column(name, justify="right", no_wrap=True)
    return table
