"""Ranks of runs are taken away, get slower, or join; each run has to end with what one device computes.

``python -m tests.elastic --count 200 --seed 1``: so many faults.
``--host-gpus 2``: on GPUs that are the host's.
``python -m tests.elastic --cases zero3+hosts/4/5:2:kill,5:3:kill``: these (mode, ranks, faults of script.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tests.elastic.cases import Case, Reference, drawn, run


def main() -> int:
    """Exit code 1 if a case went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic")
    parser.add_argument("--count", type=int, default=200, help="faults, in all runs together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="*", metavar="MODE/RANKS/FAULTS", help="in place of drawn ones")
    parser.add_argument("--host-gpus", type=int, default=0, metavar="N", help="ranks have N GPUs that are the host's")
    asked = parser.parse_args()
    given = [text.split("/") for text in asked.cases or ()]
    problems, worst, seconds, faults = 0, 0.0, [], 0
    with tempfile.TemporaryDirectory(prefix="whale_elastic_") as folder:
        reference = Reference(Path(folder))
        for case in [Case(mode, int(ranks), text) for mode, ranks, text in given] or drawn(asked.seed, asked.count):
            outcome = run(case, reference, gpus=asked.host_gpus)
            faults += len(case.faults.split(","))
            worst, problems = max(worst, outcome.difference), problems + bool(outcome.problem)
            seconds.append(outcome.seconds)
            print(f"{case}: {outcome.problem or f'{outcome.difference:.2g}'} ({outcome.seconds:.0f} s)", flush=True)
    print(
        f"{faults} faults in {len(seconds)} runs: {problems} problems, at most {worst:.2g} from one device; "
        f"a run took {statistics.median(seconds):.0f} s"
    )
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
