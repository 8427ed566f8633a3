"""Levels of zero.level with scopes and optimizers, against one device in float64; bytes against plain data parallel.

python -m tests.zero                      # all: 3 levels x {replica, split} x 5 optimizers, on 2 ranks
python -m tests.zero --levels 3 --optimizers adam lamb --ranks 3 --case gpt
"""

from __future__ import annotations

import argparse
import itertools

from tests.oracle.compare import compare
from tests.oracle.matrix import Run, Spread
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import case_named

OPTIMIZERS = ("adam", "adamw", "momentum", "lamb", "adafactor")


def main() -> int:
    """Prints a line for each run; returns 1 when one is not as one device is, or moves more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.zero", description=__doc__.partition("\n")[0])
    parser.add_argument("--levels", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--scopes", nargs="+", default=("replica", "split"))
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shares", default="", help="rows per rank, for example 5,3")
    parser.add_argument("--case", default="mlp")
    options = parser.parse_args()
    case, flavour = case_named(options.case), flavours()[0]
    shares = tuple(int(part) for part in options.shares.split(",") if part)
    failed, count = 0, 0
    worst = 0.0
    with Pool() as pool:

        def outcome(optimizer: str, scope: str):  # type: ignore[no-untyped-def]
            return compare(
                pool, Run(case, case.name, flavour, "float64", optimizer, Spread(options.ranks, shares), False, scope)
            )

        for optimizer in options.optimizers:
            plain = outcome(optimizer, "replica").logical_bytes
            for scope, level in itertools.product(options.scopes, options.levels):
                found = outcome(optimizer, f"{scope}+zero{level}")
                count += 1
                worst = max(worst, found.error)
                good = found.error <= found.limit
                moved = f"{found.logical_bytes:,} bytes a step"
                if scope == "replica":
                    ratio = found.logical_bytes / plain
                    # Norms of updates that are computed in parts are summed: some numbers for each variable.
                    good &= found.logical_bytes <= plain * (1 if level < 3 else 1.5) + 4096
                    moved += f", {ratio:.3f} of data parallel"
                failed += not good
                verdict = "as one device" if good else "WRONG"
                print(
                    f"{optimizer} {scope} zero.level={level}: {verdict}, error {found.error:.2e}, {moved}", flush=True
                )
    print(f"{count - failed} of {count} as one device; largest error {worst:.2e}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
