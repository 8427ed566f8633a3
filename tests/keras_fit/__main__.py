"""Prints the table: ``python -m tests.keras_fit [--flavour tf_keras] [--ranks 2 4] [--plans ...] [--cases ...]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.keras_fit.cases import CASES, cases_of
from tests.keras_fit.run import PLANS
from tests.keras_fit.table import REFUSED, Row, compared, plain


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.keras_fit")
    arguments.add_argument("--flavour", default="keras", choices=("keras", "tf_keras"))
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    arguments.add_argument("--cases", nargs="+", choices=list(CASES))
    asked = arguments.parse_args()
    cases = asked.cases or cases_of(asked.flavour)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        plain(asked.flavour, cases, Path(folder))
        for ranks in asked.ranks:
            for plan in asked.plans:
                mine = [c for c in cases if plan != "stages_whole" or c in REFUSED["stages"]]
                for row in compared(asked.flavour, plan, ranks, mine, Path(folder)):
                    rows.append(row)
                    said = f"{row.difference:.1e}  {row.where}" if not row.problem else row.problem[-600:]
                    said = "refused, as a pipeline must" if row.ok and row.refused else said
                    print(f"{'ok  ' if row.ok else 'NOT '} {row.ranks}  {row.plan:12} {row.case:24} {said}", flush=True)
    refused = sum(row.refused for row in rows)
    equal = sum(row.ok and not row.refused for row in rows)
    print(f"{equal} of {len(rows)} equal plain Keras to 1e-10 (half precision: to 2 %), {refused} are refused")
    return int(not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
