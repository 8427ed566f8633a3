"""Compares the table's programs: ``python -m tests.tf1 [--python OTHER ...] [--page] [NAME ...]``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tf1.table import ROOT, Row, compared

PAGE = ROOT / "docs" / "tf1.md"
HEAD = """# Programs of TensorFlow 1

`python -m tests.tf1 --page` writes this page. Each program (`tests/tf1/programs.py`, `tests/tf1/more_programs.py`) is a
script that begins with `tf.disable_v2_behavior()`, as it is run alone, with reference variables, and on two ranks after
`wh.init()`. `equal`: all that it fetches, and its variables, on both ranks: to 1e-10, or (single) in single precision
to 2e-6. `refused`: by an error that says what to add. See [the guide](guides/tf1.md).

"""


def main() -> int:
    """Exit code 1 when a program is different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="interpreter of another TensorFlow, as well")
    parser.add_argument("--page", action="store_true", help="write docs/tf1.md, of all programs")
    parser.add_argument("names", nargs="*", help="programs; none: all")
    options = parser.parse_args()
    if options.page and options.names:
        parser.error("docs/tf1.md is of all programs: leave the names away, or --page")
    columns: dict[str, list[Row]] = {}
    for python in [sys.executable, *options.python]:
        ask = [python, "-c", "import tensorflow as tf; print(tf.__version__)"]
        version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[-1]
        with tempfile.TemporaryDirectory() as folder:
            columns[version] = compared(options.names, Path(folder), python)
        counts = {kind: sum(row.kind == kind for row in columns[version]) for kind in ("equal", "refused", "different")}
        print(f"TensorFlow {version}: {len(columns[version])} programs, {counts}", flush=True)
        for row in columns[version]:
            if row.kind == "different" or options.names:
                print(f"  {row.name}: {row.kind} {row.text}", flush=True)
    if options.page:
        PAGE.write_text(HEAD + _text(columns))
    return int(any(row.kind == "different" for rows in columns.values() for row in rows))


def _text(columns: dict[str, list[Row]]) -> str:
    lines = ["| program | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    told: dict[str, str] = {}
    for rows in zip(*columns.values()):
        cells = [f"{row.kind} (single)" if row.text == "single precision" else row.kind for row in rows]
        lines.append(f"| `{rows[0].name}` | " + " | ".join(cells) + " |")
        told.update({row.name: row.text for row in rows if row.kind != "equal"})
    total = [
        f"TensorFlow {version}: {len(rows)} programs, "
        + ", ".join(f"{sum(r.kind == kind for r in rows)} {kind}" for kind in ("equal", "refused", "different"))
        for version, rows in columns.items()
    ]
    why = [f"* `{name}`: {text}" for name, text in told.items()]
    return "\n".join([*total, "", *lines, "", "What is refused, and what to add:", "", *why, ""])


if __name__ == "__main__":
    sys.exit(main())
