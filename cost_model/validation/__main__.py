"""Compares predictions with published measurements: python -m cost_model.validation [--rows file.csv ...] [--out
folder]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cost_model.validation import report
from cost_model.validation.cases import DATA, read
from whale.errors import WhaleError


def main(arguments: list[str] | None = None) -> int:
    """Prints predicted and published seconds per row, then one line per table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cost_model.validation", description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="CSV files of published rows (default: those in the package)"
    )
    parser.add_argument("--out", type=Path, help="also write validation.md and validation.svg there (needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        found = []
        for path in options.rows or sorted(DATA.glob("*.csv")):
            published, cases = read(path)
            if not cases:
                print(f"validation: {path} has no rows", file=sys.stderr)
                return 2
            found.append((published, report.results(cases)))
        rows = "\n\n".join(report.table(published.name, results) for published, results in found)
        lines = "\n".join(report.summary(published, results) for published, results in found)
        print(rows, lines, sep="\n\n")
        if options.out:
            from cost_model.validation.figure import draw

            draw([(published.name, results) for published, results in found], options.out / "validation.svg")
            (options.out / "validation.md").write_text(report.page(rows, lines))
    except (WhaleError, OSError) as error:
        print(f"validation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
