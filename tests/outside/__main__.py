"""``python -m tests.outside FOLDER [NAMES] [--plans replica ...] [--seconds 280] [--out docs/outside.md]``.

Results are kept in the folder's ``results``, with what each program computes alone; ``--out`` writes the table of all
that are there, and keeps the other rows of an earlier table. Programs that have results for every plan are not run
again, unless they were changed since, or with ``--again``; ``--seconds 0`` runs none, and writes the table. Names stand
before options.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests import forkserver
from tests.outside.run import PLANS
from tests.outside.table import (
    ALONE,
    COLUMNS,
    LIMIT,
    ROUNDED_LIMIT,
    Result,
    compare,
    find_alone,
    format_reasons,
    format_row,
    list_programs,
    merge_lines,
    read_results,
    save_results,
)

_COLUMNS = " | ".join(PLANS).replace("auto_parallel", "auto")
_HEAD = f"""# Real programs of others

Written by `python -m tests.outside FOLDER --out docs/outside.md`. The folder has programs of others, one a file,
shrunk to little data, few steps and narrow layers; neither they nor the package that some of them need are part of
this repository. Each runs alone, in a process that never imports Whale, and under plans: with `import whale as wh;
wh.init(...)` before it, `tf.function` read as `wh.function`, `batch.norm_statistics="batch"` and
`batch.random="global"`. What methods of models and steps return, and all weights with optimizers' state, is taken
by hooks in Keras and TensorFlow and compared.

A number is the largest difference over all of these, relative to the largest element of each: at most {LIMIT:g} in
float64 and {ROUNDED_LIMIT:g} in float32, or ten times as much as the program is off alone when its first weights
are moved by a unit in the last place. `replica` is two processes of `whale run`, `auto` and `zero` (ZeRO 2) two ranks
that are threads of a process, `three` three, which no batch divides evenly. What is empty was not run, what is bold
differs. Rows of programs that the folder does not have are those of an earlier one.
The last columns are seconds of a processor until every step has been called once: of the program alone, of one of the
two processes, and their ratio.

{COLUMNS}{_COLUMNS} | alone s | rank s | ratio |
|---|---|---|---|{"---|" * len(PLANS)}---|---|---|
"""


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.outside")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    arguments.add_argument("--again", action="store_true", help="also what has results")
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so long")
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    programs, kept = list_programs(asked.folder.resolve()), asked.folder.resolve() / "results"
    end_s = time.monotonic() + asked.seconds
    chosen = [one for name in asked.names for one in programs if one.name == name] or programs
    forkserver.open_folder()
    try:
        for program in chosen:
            known = {one.plan: one for one in read_results(program, kept)}
            plans = [plan for plan in asked.plans if asked.again or not {plan, ALONE} & set(known)]
            if time.monotonic() > end_s or (asked.plans and not plans):
                continue
            with tempfile.TemporaryDirectory() as folder:
                if problem := find_alone(program, Path(folder), kept):
                    save_results(program, [Result(ALONE, problem=problem)], kept)
                    print(f"--  {program.name}: does not run alone: {problem[-1500:]}", flush=True)
                    continue
                if not asked.plans:
                    print(f"ok  {program.name}: runs alone", flush=True)
                for plan in plans:
                    known[plan] = found = compare(program, plan, Path(folder))
                    said = found.problem[-1500:] or f"{found.difference:.1e} (limit {found.limit:.0e}) {found.where}"
                    seconds = f"{found.first_s:.1f} s, alone {found.plain_first_s:.1f} s"
                    print(
                        f"{'ok ' if found.is_equal else 'NOT'} {program.name:24} {plan:13} {seconds}  {said}",
                        flush=True,
                    )
                    save_results(program, [known[one] for one in PLANS if one in known], kept)
    finally:
        forkserver.close_folder()
    results = {program: read_results(program, kept) for program in programs}
    if asked.out:
        shown = {program: found for program, found in results.items() if any(one.plan != ALONE for one in found)}
        before = asked.out.read_text() if asked.out.exists() else ""
        here = {program.name for program in shown}
        rows = merge_lines(before, "| ", "".join(format_row(*one) for one in shown.items()), here)
        reasons = merge_lines(before, "* ", "".join(format_reasons(*one) for one in shown.items()), here)
        asked.out.write_text(
            _HEAD + rows + (f"\n## What was refused, and what cannot be compared\n\n{reasons}" if reasons else "")
        )
    everything = [one for found in results.values() for one in found]
    print(f"{sum(one.is_equal for one in everything)} of {len(everything)} equal themselves alone")
    return int(not all(one.is_equal for one in everything))


if __name__ == "__main__":
    sys.exit(main())
