"""Levels of memory.zero with scopes and optimizers, against one device in float64; bytes against plain data parallel.

python -m tests.zero                      # all: 3 levels x {replica, split} x {1, 2} micro-batches x 5 optimizers,
                                          # and 3 of version 1 in a session
python -m tests.zero --levels 3 --optimizers adam clipped --ranks 3 --shares 3,1,4 --case gpt
python -m tests.zero --scopes split:2 --ranks 4     # groups of two ranks that split, side by side
"""

from __future__ import annotations

import argparse
import itertools

from tests.oracle.compare import Outcome, compare
from tests.oracle.matrix import Run, Spread
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import case_named

OPTIMIZERS = ("adam", "adamw", "momentum", "lamb", "adafactor")
SESSIONS = (("tf1_mlp", "adam"), ("tf1_momentum", "momentum"), ("tf1_adagrad", "adagrad"))


def main() -> int:
    """Prints a line for each run; returns 1 when one is not as one device is, or moves more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.zero", description=__doc__.partition("\n")[0])
    parser.add_argument("--levels", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--scopes", nargs="+", default=("replica", "split"))
    parser.add_argument("--optimizers", nargs="+")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shares", default="", help="rows per rank, for example 5,3")
    parser.add_argument("--case")
    options = parser.parse_args()
    cases = [(options.case or "mlp", optimizer) for optimizer in options.optimizers or OPTIMIZERS]
    cases += SESSIONS if not options.case and not options.optimizers else ()
    flavour = flavours()[0]
    spread = Spread(options.ranks, tuple(int(part) for part in options.shares.split(",") if part))
    failed, count = 0, 0
    worst = 0.0
    with Pool() as pool:

        def outcome(name: str, optimizer: str, scope: str) -> Outcome:
            return compare(pool, Run(case_named(name), name, flavour, "float64", optimizer, spread, False, scope))

        for (name, optimizer), parts in itertools.product(cases, options.micro_batches):
            accumulated = f"+micro:{parts}" if parts > 1 else ""
            plain = outcome(name, optimizer, "replica" + accumulated).logical_bytes
            for scope, level in itertools.product(options.scopes, options.levels):
                found = outcome(name, optimizer, f"{scope}+zero{level}{accumulated}")
                count += 1
                worst = max(worst, found.error)
                good = found.error <= found.limit
                moved = f"{found.logical_bytes:,} bytes a step"
                if scope == "replica":
                    ratio = found.logical_bytes / plain
                    good &= found.logical_bytes <= plain * (1 if level < 3 else 1.5) + _of_norms(optimizer, plain)
                    moved += f", {ratio:.3f} of data parallel"
                failed += not good
                what = f"{name} {optimizer} {scope} memory.zero={level}" + (
                    f" micro-batches={parts}" if parts > 1 else ""
                )
                verdict = "as one device" if good else "WRONG"
                print(f"{what}: {verdict}, error {found.error:.2e}, {moved}", flush=True)
    print(f"{count - failed} of {count} as one device; largest error {worst:.2e}")
    return bool(failed)


def _of_norms(optimizer: str, plain: int) -> int:
    """Bytes that an update in parts moves beside weights and gradients.

    Norms of whole weights are summed, some numbers for each variable. Adafactor also keeps a mean for each column, of
    which every rank has a part: as many numbers as a row of the weight has, which is a tenth of these small weights.
    """
    return 256 + (plain // 10 if optimizer == "adafactor" else 0)


if __name__ == "__main__":
    raise SystemExit(main())
