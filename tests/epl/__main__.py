"""Runs scripts of the Easy Parallel Library and compares each with one device, in float64.

python -m tests.epl                  # all of them: about two minutes
python -m tests.epl --only clip saver
"""

from __future__ import annotations

import argparse
import sys

import tensorflow as tf

from tests.epl.cases import CASES, LIMIT
from tests.epl.compare import difference, results


def main() -> int:
    """Returns the exit code: 1 when a script is not as one device."""
    parser = argparse.ArgumentParser(prog="python -m tests.epl", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts")
    parser.add_argument("--ranks", type=int, help="this number only")
    options = parser.parse_args()
    wanted = {c.function for c in CASES if not options.only or c.function in options.only}
    limits = {c.function: c.limit for c in CASES}
    good = total = 0
    largest = 0.0
    for ranks in (2, 4):
        names = [c.function for c in CASES if ranks in c.ranks and c.function in wanted]
        if not names or options.ranks not in (None, ranks):
            continue
        alone, spread = results("alone", ranks, names), results("spread", ranks, names)
        for name in names:
            error, where = max(difference(spread[name, rank], alone[name, None]) for rank in range(ranks))
            limit = limits[name]
            total, good = total + 1, good + (error <= limit)
            largest = max(largest, error) if limit == LIMIT else largest
            print(f"{name:24} {ranks} ranks  {error:.1e}  {'' if error <= limit else where}", flush=True)
    print(
        f"{good} of {total} scripts as one device, the largest difference in float64 {largest:.1e} "
        f"(TensorFlow {tf.__version__})"
    )
    return int(good < total)


if __name__ == "__main__":
    sys.exit(main())
