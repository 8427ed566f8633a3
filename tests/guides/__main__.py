"""``python -m tests.guides [NAMES] [--ranks 2 4] [--out docs/programs.md]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.guides.table import LIMIT, NEEDS, ROUNDED_LIMIT, Row, about, alone, compared, missing, names

_HEAD = f"""# Programs of others

Written by `python -m tests.guides --out docs/programs.md`. The programs in tests/guides/scripts are written as guides
and libraries have them, for one device, and know nothing of Whale; `import whale as wh; wh.init(...)` is put in front
of them, with `batch.norm_statistics="batch"` and `batch.random="global"`, and `whale run -np N` starts them. Compared
with the same program alone: histories, predictions and weights, on every rank, relative to the largest element of
each; at most {LIMIT:g} in float64, and {ROUNDED_LIMIT:g} for libraries that compute in float32. Sonnet has no loop of
its own: there
`@tf.function` is also changed to `@wh.function`.

| program | written for | what it does | ranks | worst difference | |
|---|---|---|---|---|---|
"""


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.guides")
    arguments.add_argument("names", nargs="*", default=names())
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2])
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    rows: list[Row] = []
    for name in asked.names:
        if package := missing(name):
            rows.append(Row(name, 0, problem=f"{package} is not installed", left_out=True))
            print(f"--  {name}: {package} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed = alone(name, Path(folder))
            for ranks in asked.ranks:
                row = Row(name, ranks, problem=failed) if failed else compared(name, ranks, Path(folder))
                rows.append(row)
                said = f"{row.difference:.1e}  {row.where}" if not row.problem else row.problem
                print(f"{'ok ' if row.ok else 'NOT'} {ranks}  {name:28} {said}", flush=True)
    left_out = sum(row.left_out for row in rows)
    equal = f"{sum(row.ok for row in rows)} of {len(rows) - left_out} equal themselves alone"
    print(f"{equal}, {left_out} left out: their packages are not installed" if left_out else equal)
    if asked.out:
        asked.out.write_text(_HEAD + "".join(_line(row) for row in rows))
    return int(not all(row.ok or row.left_out for row in rows))


def _line(row: Row) -> str:
    last = [line for line in row.problem.splitlines() if line.strip()]
    ends = f"{row.difference:.1e} | equal" if row.ok else f"{row.difference:.1e} | **not equal**"
    if row.problem:
        ends = f"| {last[-1][:160]}"
    return f"| {row.name} | {NEEDS.get(row.name, 'keras')} | {about(row.name)} | {row.ranks or ''} | {ends} |\n"


if __name__ == "__main__":
    sys.exit(main())
