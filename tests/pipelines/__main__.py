"""Runs pipelines of many kinds and compares each with one device, in float64.

python -m tests.pipelines                        # all of them: some minutes
python -m tests.pipelines --only "2 -> 3" --micro-batches 4
python -m tests.pipelines --part 1/2             # the first half of them, say
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict

from tests.pipelines.compare import LIMIT, difference
from tests.pipelines.matrix import LAYOUTS, MICRO_BATCHES, Run, all_runs


def main() -> int:
    """Returns the exit code: 1 when a run is not as one device."""
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="layouts with this in their name")
    parser.add_argument("--micro-batches", type=int, help="this number only")
    parser.add_argument("--part", default="1/1", help="every k-th run: 2/3 takes the second of each three")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    runs = [
        run
        for run in all_runs()
        if options.only in run.layout.name and options.micro_batches in (None, run.micro_batches)
    ][part - 1 :: parts]
    worst: dict[tuple[str, int], list[float]] = defaultdict(list)
    failed: list[Run] = []
    start_s = time.monotonic()
    for run in runs:
        try:
            error, where = difference(run)
        except Exception as problem:  # the others go on
            error, where = float("inf"), f"{type(problem).__name__}: {problem}"
        worst[run.layout.name, run.micro_batches].append(error)
        if not error <= LIMIT:
            failed.append(run)
            print(f"{run}: {error:.1e} {where}", flush=True)
    print(table(worst))
    largest = max((e for errors in worst.values() for e in errors), default=0.0)
    seconds = time.monotonic() - start_s
    print(f"{len(runs) - len(failed)} of {len(runs)} pipelines as one device, the largest difference {largest:.1e}")
    print(f"(limit {LIMIT:.0e}, float64, {seconds:.0f} s)")
    return int(bool(failed))


def table(worst: dict[tuple[str, int], list[float]]) -> str:
    """The largest difference of each layout and number of micro-batches, with the number of runs."""
    lines = ["| stages | " + " | ".join(f"{m} micro-batch{'es' * (m > 1)}" for m in MICRO_BATCHES) + " |"]
    lines.append("|---|" + "---|" * len(MICRO_BATCHES))
    for layout in LAYOUTS:
        cells = [worst.get((layout.name, m), []) for m in MICRO_BATCHES]
        if any(cells):
            shown = " | ".join(f"{max(c):.0e} ({len(c)})" if c else "-" for c in cells)
            lines.append(f"| {layout.name} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
