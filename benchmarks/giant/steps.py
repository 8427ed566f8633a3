"""Step times of giant layers beside plain TensorFlow and data parallelism, in one interleaved run.

    python -m benchmarks.giant.steps [--only experts] [--rounds 9] [--steps 3]

Experts: tokens go to experts on ranks of their own (``wh.split``), against one process with as many threads as cores,
and against data parallelism (Horovod's where it is installed, and Whale's), which has every expert on every rank.

DLRM: 26 tables, Zipf 1.05, batch 4,096, with 100 thousand and with 50 million rows in all; for each optimizer, by one
process and by two ranks. What a step takes must not grow with the tables. Of larger ones a batch touches more rows, so
there is a row in which ids are among as many as of the small ones, all over the large ones.

Every row is a process group that stays alive. In each round each group runs some steps, one group after the other,
while the others are stopped. Shown are medians of a round's mean, on the slowest rank, and the processor time of a
step, all ranks together: on a machine that others use too, that is the surer figure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.giant.embeddings import OPTIMIZERS
from benchmarks.groups import Group, under_mpirun
from benchmarks.machine import machine
from whale.launcher.mpirun import MEMORY_VARIABLES
from whale.launcher.worker import make_thread_variables

TIMEOUT_S = 300.0
WARM_UP = 1  # rounds that are not counted
EXPERTS = {"form": "scatter", "experts": 8, "groups": 4, "tokens": 2048, "width": 512, "hidden": 2048}
BATCH, WIDTH = 4096, 8
# Rows of the largest table (7.48 times as many in all), and of how many one is used.
FEW, TIMES = 13_375, 500
SIZES = {
    "100 thousand rows": (FEW, 1),
    "50 million rows, as many used": (FEW * TIMES, TIMES),
    "50 million rows": (FEW * TIMES, 1),
}


@dataclass(frozen=True)
class Row:
    """What one group runs; rows that differ in ``part`` alone share a group."""

    title: str
    kind: str
    model: str
    sizes: dict[str, Any]
    ranks: int = 1
    part: int = 1

    @property
    def group(self) -> str:
        """Names the group."""
        return json.dumps([self.kind, self.model, self.sizes, self.ranks])


@dataclass
class Found:
    """Samples of a row: milliseconds of a step, of the processor, and bytes that all ranks send in a step."""

    times_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    sent: float = 0.0


def rows_of_experts() -> list[Row]:
    """Plain TensorFlow, and each way with 2 and with 4 ranks."""
    rows = [Row("TensorFlow", "plain", "experts", EXPERTS)]
    ways = [
        ("Whale, experts split", "whale"),
        ("Whale, data parallel", "replica"),
        ("Horovod, data parallel", "horovod"),
    ]
    for title, kind in ways:
        if kind == "horovod" and importlib.util.find_spec("horovod") is None:
            print("Horovod is not installed (python -m whale_ops.build_horovod builds it): no row", flush=True)
            continue
        rows += [Row(f"{title}, {ranks} ranks", kind, "experts", EXPERTS, ranks) for ranks in (2, 4)]
    return rows


def rows_of_dlrm(optimizer: str) -> list[Row]:
    """Few and many rows of tables, by one process and by two ranks."""
    made = []
    for ranks, kind, who in ((1, "plain", "TensorFlow"), (2, "whale", "Whale, 2 ranks")):
        for size, (rows, part) in SIZES.items():
            sizes = {"batch": BATCH, "rows": rows, "width": WIDTH, "optimizer": optimizer}
            made.append(Row(f"{who}, {optimizer}, {size}", kind, "dlrm", sizes, ranks, part))
    return made


def measure(rows: Sequence[Row], rounds: int, steps: int) -> dict[str, Found]:
    """Round after round, every group in turn."""
    found = {row.title: Found() for row in rows}
    with contextlib.ExitStack() as stack:
        groups: dict[str, Group] = {}
        for row in rows:
            if row.group not in groups:
                groups[row.group] = stack.enter_context(_start(row))
        for number in range(-WARM_UP, rounds):
            for row in rows:
                answers, title = groups[row.group].ask(TIMEOUT_S, steps=steps, part=row.part), row.title
                if number >= 0:
                    found[title].times_ms.append(1e3 * max(statistics.mean(a["times_s"]) for a in answers))
                    found[title].cpu_ms.append(1e3 * sum(a["cpu_s"] for a in answers))
                    found[title].sent = sum(a["bytes"] for a in answers)
    return found


def _start(row: Row) -> Group:
    worker = [sys.executable, "-m", "benchmarks.giant.worker", row.kind, row.model, json.dumps(row.sizes)]
    cores = len(os.sched_getaffinity(0))
    variables = {name: str(value) for name, value in make_thread_variables(max(1, cores // row.ranks)).items()}
    if row.kind in ("whale", "replica"):
        variables |= MEMORY_VARIABLES  # as `whale run` starts ranks
    return Group(row.title, worker if row.ranks == 1 else under_mpirun(worker, row.ranks), row.ranks, variables)


def table(found: dict[str, Found], beside: dict[str, str]) -> str:
    """A line for each row; ratios to the row that ``beside`` names."""
    lines = ["| | ms a step | processor, ms | MiB sent | beside | time | processor |", "|---|---|---|---|---|---|---|"]
    for title, one in found.items():
        time_ms, cpu_ms = statistics.median(one.times_ms), statistics.median(one.cpu_ms)
        ratios = "| | | |"
        if title in beside:
            other = found[beside[title]]
            # Of each round by itself: what else the machine did meets both.
            times = statistics.median(a / b for a, b in zip(one.times_ms, other.times_ms))
            cpus = statistics.median(a / b for a, b in zip(one.cpu_ms, other.cpu_ms))
            ratios = f"| {beside[title]} | {times:.2f} | {cpus:.2f} |"
        lines.append(f"| {title} | {time_ms:.0f} | {cpu_ms:.0f} | {one.sent / 2**20:.2f} {ratios}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help=f"experts, or some of {','.join(OPTIMIZERS)}; empty: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the groups are stopped, and have to be ended
    known = ["experts", *OPTIMIZERS]
    wanted = options.only.split(",") if options.only else known
    if not set(wanted) <= set(known):
        parser.error(f"--only are some of {', '.join(known)}")
    print(f"Measured on {machine()}.\n", flush=True)
    for name in wanted:
        if name == "experts":
            rows = rows_of_experts()
            beside = {row.title: rows[0].title for row in rows[1:]}
        else:
            rows = rows_of_dlrm(name)
            few, same, many, *of_ranks = (row.title for row in rows)
            beside = {same: few, many: few, **dict(zip(of_ranks, (few, of_ranks[0], of_ranks[0])))}
        print(table(measure(rows, options.rounds, options.steps), beside), flush=True)


if __name__ == "__main__":
    main()
