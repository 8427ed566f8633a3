"""Runs pipelines of many kinds and compares each with one device, in float64.

python -m tests.pipelines                        # all of them: some minutes
python -m tests.pipelines --only "2 -> 3" --micro-batches 4
python -m tests.pipelines --part 1/2             # the first half of them, say
python -m tests.pipelines --draw 40 --seed 7     # so many random trainings instead (tests/pipelines/draws.py)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict

from tests.pipelines.compare import LIMIT, difference
from tests.pipelines.draws import difference_of, draw_training
from tests.pipelines.matrix import LAYOUTS, MICRO_BATCHES, Run, all_runs
from whale.errors import WhaleError


def main() -> int:
    """Returns the exit code: 1 when a run is not as one device."""
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="layouts with this in their name")
    parser.add_argument("--micro-batches", type=int, help="this number only")
    parser.add_argument("--part", default="1/1", help="every k-th run: 2/3 takes the second of each three")
    parser.add_argument("--draw", type=int, metavar="COUNT", help="draw so many trainings")
    parser.add_argument("--seed", type=int, default=1, help="of the first one of --draw; the next has the next one")
    options = parser.parse_args()
    if options.draw:
        return drawn(options.seed, options.draw)
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


def drawn(seed: int, count: int) -> int:
    """Makes random trainings, each a line, and says at the end why some were refused."""
    wrong, largest, refused = 0, 0.0, Counter[str]()
    for number in range(seed, seed + count):
        training = draw_training(number)
        try:
            error, where = difference_of(training)
        except WhaleError as problem:
            refused[str(problem).partition("\n")[0]] += 1
            print(f"refused {training}: {problem}", flush=True)
            continue
        except Exception as problem:  # the others go on
            error, where = float("inf"), f"{type(problem).__name__}: {problem}"
        largest = max(largest, error)
        wrong += not error <= LIMIT
        print(f"{'equal  ' if error <= LIMIT else 'WRONG  '} {training}: {error:.0e} {where}", flush=True)
    for reason, times in refused.most_common():
        print(f"refused {times} times: {reason}")
    equal = count - wrong - refused.total()
    print(f"{count} trainings from seed {seed}: {equal} as one device, {refused.total()} refused, {wrong} wrong")
    print(f"(limit {LIMIT:.0e}, float64; the largest difference {largest:.1e})")
    return int(wrong > 0)


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
