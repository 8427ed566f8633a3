"""Compares drawn programs with one device: ``python -m tests.streams [--kind draws] [--first 0] [--count 500]``.

Programs from number 1,000,000 on are also of those kinds in which TensorFlow itself may race.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.launcher.helpers import Launcher
from tests.oracle.metric import FLOAT64_LIMIT
from tests.streams.compare import differences, run

PLACES = {"orders": ("ranks",), "draws": ("2", "3")}
HOURS_S = 6 * 3600.0


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.streams")
    arguments.add_argument("--kind", choices=PLACES, default="orders")
    arguments.add_argument("--count", type=int, default=200)
    arguments.add_argument("--first", type=int, default=0)
    asked = arguments.parse_args()
    numbers = range(asked.first, asked.first + asked.count)
    wrong, worst, left_out = 0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder))
        plain, again = Path(folder, "plain"), Path(folder, "again")
        for each in (plain, again):
            each.mkdir()
            run(launcher, asked.kind, "plain", each, numbers, HOURS_S)
        taken = [number for number in numbers if (again / f"plain_{number}.npz").exists()]
        for number in taken:  # what one device does in another way each time nothing can be compared with
            (again / f"plain_{number}.npz").rename(plain / f"rank_again_{number}.npz")
            if max(differences(plain, number))[0] > 0:
                left_out += 1
                (plain / f"plain_{number}.npz").unlink()
            (plain / f"rank_again_{number}.npz").unlink()
        kept = [number for number in taken if (plain / f"plain_{number}.npz").exists()]
        for place in PLACES[asked.kind]:
            run(launcher, asked.kind, place, plain, kept, HOURS_S)
            for number in kept:
                error, where = max(differences(plain, number))
                worst = max(worst, error)
                if error > FLOAT64_LIMIT:
                    wrong += 1
                    print(f"{asked.kind} {number} on {place}: {error:.1e} {where}", flush=True)
    text = f"{asked.kind} {numbers.start} to {numbers.stop - 1}: {len(kept)} programs, {wrong} wrong, worst {worst:.1e}"
    print(f"{text}; on one device {left_out} are not the same twice, {len(numbers) - len(taken)} do not run")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
