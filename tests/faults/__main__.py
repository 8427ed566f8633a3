"""Tries randomised faults one after the other and prints how long the errors took.

    python -m tests.faults --count 100 --seed 1 [--transports memory,mpi,hosts] [--devices]

Each is a run of its own: a rank is killed, stopped, raises, or calls something with another shape, dtype or op than the
others, at a random time after the start, over shared memory or MPI. Ends with code 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.faults.trial import DEVICES, LIMITS_S, TRANSPORTS, Trial, run


def trials(
    count: int, seed: int, steps: float, transports: Sequence[str] = TRANSPORTS, devices: Sequence[str] = ()
) -> list[Trial]:
    """Faults of all kinds and transports in turn, the rest at random; ``steps`` is the share of steps of TensorFlow.

    ``devices``: what carries out the exchanges of steps, in turn; none: Whale.
    """
    generator, kinds, found = random.Random(seed), list(LIMITS_S), []
    for index in range(count):
        size = generator.choice((2, 4))
        work = "steps" if generator.random() < steps else "exchange"
        after_s = generator.uniform(0.0, 3.0)
        turn, number = divmod(index, len(kinds))
        if work == "steps" and devices:
            work = devices[(turn + number) % len(devices)]
        transport = transports[(turn + number) % len(transports)]
        found.append(Trial(work, kinds[number], size, generator.randrange(size), round(after_s, 3), transport))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=1, help="number of the first that is made, of those of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1.0, help="share of faults in TensorFlow steps (default: all)")
    parser.add_argument(
        "--transports", default=",".join(TRANSPORTS), help="of memory, mpi and hosts (two emulated ones)"
    )
    parser.add_argument("--devices", action="store_true", help="steps exchange through devices (the host's memory)")
    options = parser.parse_args()
    tried = trials(
        options.first - 1 + options.count,
        options.seed,
        options.steps,
        options.transports.split(","),
        DEVICES if options.devices else (),
    )[options.first - 1 :]
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    failures = busy = 0
    for number, trial in enumerate(tried, options.first):
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="whale-fault-") as folder:
            outcome = run(trial, Path(folder))
        if outcome.seconds is not None:
            seconds[trial.work, trial.kind].append(outcome.seconds)
        failures += bool(outcome.problems)
        busy += outcome.busy
        took_s = time.monotonic() - start_s
        error_s = math.nan if outcome.seconds is None else outcome.seconds
        print(f"{number:4d}  {trial}  error after {error_s:.2f} s, run {took_s:.0f} s", flush=True)
        for problem in outcome.problems:
            print(f"      WRONG: {problem}", flush=True)
    print("\nwork      kind    count  median s  worst s  limit s")
    for (work, kind), found in sorted(seconds.items()):
        row = f"{len(found):5d}  {statistics.median(found):8.2f}  {max(found):7.2f}  {LIMITS_S[kind]:7g}"
        print(f"{work:8}  {kind:6}  {row}")
    print(f"{options.count} faults, {failures} with problems (seed {options.seed})")
    print(f"{busy} ranks were ended while they traced or compiled: no step of theirs was blocked")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
