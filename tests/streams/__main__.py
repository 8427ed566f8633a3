"""Compares drawn programs with one device: ``python -m tests.streams [--kind draws] [--first 0] [--count 500]``.

Programs from number 1,000,000 on are also of those kinds in which TensorFlow itself may race.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.launcher.helpers import Launcher
from tests.oracle.metric import FLOAT64_LIMIT
from tests.streams.compare import differences, run

PLACES = {"orders": ("ranks",), "draws": ("2", "3")}
COUNTS = {"orders": 200, "draws": 500}
AT_ONCE = 30  # programs of a line that is printed
LIMIT_S = 1800.0  # for them


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.streams")
    arguments.add_argument("--kind", choices=COUNTS, help="both unless given")
    arguments.add_argument("--count", type=int)
    arguments.add_argument("--first", type=int, default=0)
    asked = arguments.parse_args()
    wrong = 0
    for kind in [asked.kind] if asked.kind else COUNTS:
        numbers = range(asked.first, asked.first + (asked.count or COUNTS[kind]))
        found = sum(compare(kind, numbers[begin : begin + AT_ONCE]) for begin in range(0, len(numbers), AT_ONCE))
        print(f"{kind} {numbers.start} to {numbers.stop - 1}: {found} wrong", flush=True)
        wrong += found
    return int(wrong > 0)


def compare(kind: str, numbers: range) -> int:
    """Compares programs of a kind, prints those that differ; returns how many do."""
    wrong, worst, left_out = 0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder))
        plain, again = Path(folder, "plain"), Path(folder, "again")
        for each in (plain, again):
            each.mkdir()

        failed: dict[int, str] = {}

        def make(job: tuple[str, Sequence[int]]) -> None:
            place, left = job
            while left:
                try:
                    return run(launcher, kind, place, plain, left, LIMIT_S)
                except (
                    AssertionError,
                    subprocess.TimeoutExpired,
                ) as error:  # with the first of which not all ranks saved anything
                    ranks = 2 if place == "ranks" else 1
                    done = [len(list(plain.glob(f"rank*_{number}.npz"))) >= ranks for number in left]
                    if place == "plain" or all(done):
                        raise
                    failed[left[done.index(False)]] = str(error)
                    left = left[done.index(False) + 1 :]

        def side_by_side(jobs: Iterable[tuple[str, Sequence[int]]]) -> None:
            with ThreadPoolExecutor() as pool:
                list(pool.map(make, jobs))

        side_by_side(("plain", numbers[begin::2]) for begin in range(2))
        taken = [number for number in numbers if (plain / f"plain_{number}.npz").exists()]
        places = PLACES[kind]
        placed = {number: places[number % len(places)] for number in taken}
        side_by_side((place, [number for number in taken if placed[number] == place]) for place in places)
        for number, said in failed.items():
            print(f"{kind} {number} on {placed[number]} failed:\n{said[-2000:]}", flush=True)
        wrong += len(failed)
        taken = [number for number in taken if number not in failed]
        found = {number: (*max(differences(plain, number)), placed[number]) for number in taken}
        suspect = [number for number in taken if found[number][0] > FLOAT64_LIMIT]
        if suspect:  # what one device does in another way each time nothing can be compared with
            run(launcher, kind, "plain", again, suspect, LIMIT_S)
        for number in taken:
            error, where, place = found[number]
            if number in suspect:
                (again / f"plain_{number}.npz").rename(again / f"rank_{number}.npz")
                (plain / f"plain_{number}.npz").rename(again / f"plain_{number}.npz")
                if max(differences(again, number))[0] > 0:
                    left_out += 1
                    continue
                wrong += 1
                print(f"{kind} {number} on {place}: {error:.1e} {where}", flush=True)
            worst = max(worst, error)
    compared = len(taken) + len(failed) - left_out
    text = f"{kind} {numbers.start} to {numbers.stop - 1}: {compared} programs, {wrong} wrong, worst {worst:.1e}"
    unable = len(numbers) - len(taken) - len(failed)
    print(f"{text}; on one device {left_out} are not the same twice, {unable} do not run", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
