"""Compares predictions with published measurements: python -m cost_model.validation [--rows file.csv ...] [--out
folder]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cost_model.analytic import stacks
from cost_model.validation import intervals, report
from cost_model.validation.cases import DATA, read
from whale.errors import WhaleError


def main(arguments: list[str] | None = None) -> int:
    """Prints predicted and published seconds per row, then one line of errors per table.

    Returns the exit status: 1 if some rows could not be predicted, 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m cost_model.validation", description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="CSV files of published rows (default: those in the package)"
    )
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="calibrate the intervals of the package's stacks on its rows, and write them into the stacks' files",
    )
    parser.add_argument("--out", type=Path, help="also write validation.md and validation.svg there (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.intervals and options.rows:
        parser.error(
            "--intervals cannot be combined with --rows: it calibrates the package's stacks on the package's rows; "
            "to fit a stack to other rows, use whale simulate --fit"
        )
    try:
        found = []
        for path in options.rows or sorted(DATA.glob("*.csv")):
            published, cases = read(path)
            if not cases:
                print(f"validation: {path} has no rows", file=sys.stderr)
                return 2
            found.append((published, report.results(cases)))
        if options.intervals:
            groups = intervals.grouped([one for _, results in found for one in results])
            intervals.write(stacks.FOLDER, intervals.calibrate(groups))
            return 0
        inside = [None] * len(found) if options.rows else intervals.each_left_out([own for _, own in found])
        rows = "\n\n".join(report.table(published.name, results) for published, results in found)
        lines = "\n".join(report.summary(published, results, own) for (published, results), own in zip(found, inside))
        print(rows, lines, sep="\n\n")
        if options.out:
            from cost_model.validation.figure import draw

            draw([(published.name, results) for published, results in found], options.out / "validation.svg")
            (options.out / "validation.md").write_text(report.page(rows, lines))
    except (WhaleError, OSError) as error:
        print(f"validation: {error}", file=sys.stderr)
        return 2
    return int(any(one.problem for _, results in found for one in results))


if __name__ == "__main__":
    sys.exit(main())
