"""python -m cost_model.validation [--rows file.csv ...] [--figure file.png]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from whale.errors import WhaleError

from . import report
from .cases import DATA, read


def main(arguments: list[str] | None = None) -> int:
    """Prints predicted against published seconds per row, then one line per table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cost_model.validation", description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="CSV files of published rows (default: those in the package)"
    )
    parser.add_argument("--figure", type=Path, help="also draw predicted against measured (needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        found = []
        for path in options.rows or sorted(DATA.glob("*.csv")):
            table, cases = read(path)
            results = report.results(cases)
            if not results:
                print(f"{path} has no rows", file=sys.stderr)
                return 2
            print(report.table(f"{table.name} ({path.name})", results), end="\n\n")
            found.append((table, results))
        for table, results in found:
            print(report.summary(table, results))
        if options.figure:
            from .figure import draw

            draw([(table.name, results) for table, results in found], options.figure)
    except (WhaleError, OSError) as error:
        print(f"validation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
