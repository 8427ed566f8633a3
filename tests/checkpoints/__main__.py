"""Prints the errors of all pairs of plans: ``python -m tests.checkpoints``; 1e-10 is the limit."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints.matrix import PLANS, continued, error, reference, save

LIMIT = 1e-10


def main() -> int:
    start = time.monotonic()
    wanted = reference()
    width = max(map(len, PLANS)) + 2
    print("saved under".ljust(width) + "".join(name.rjust(width) for name in PLANS), flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for saver in PLANS:
            path = save(saver, Path(folder) / saver.replace(" ", "_"))
            row = [max(error(values, wanted) for values in continued(loader, path)) for loader in PLANS]
            worst = max(worst, *row)
            print(saver.ljust(width) + "".join(f"{e:.1e}".rjust(width) for e in row), flush=True)
    seconds = time.monotonic() - start
    print(
        f"{len(PLANS) ** 2} pairs, each restored twice: largest error {worst:.2e} (limit {LIMIT:.0e}); {seconds:.0f} s"
    )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
