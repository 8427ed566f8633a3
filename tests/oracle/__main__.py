"""Runs the oracle by hand.

python -m tests.oracle --case mlp --dtype float64 --optimizer sgd --ranks 3 --shares 5,3,0
python -m tests.oracle --table docs/oracle.md        # the full matrix of this TensorFlow
python -m tests.oracle --table docs/oracle_split.md --under-split        # the cases under `wh.split`
python -m tests.oracle --draw 300 --seed 7           # so many runs that are in no table: scopes, settings, rows
python -m tests.oracle --case gpt --draw 50          # of these cases
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import queue
import re
import sys
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf
from rich.progress import MofNCompleteColumn, Progress, TaskID

from tests.oracle.compare import Outcome, compare
from tests.oracle.matrix import SPREADS, UNDER_SPLIT, Run, Spread, all_runs, draw_runs, runs_under_split
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import CASES, case_named
from whale.errors import REPORT_FAULT


def main() -> int:
    """Returns the exit code: 1 when a run is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, help="run the full matrix and write its table to this file")
    parser.add_argument("--under-split", action="store_true", help="with --table: the cases under wh.split")
    parser.add_argument("--case", action="append", help="case of the zoo (repeatable); not alone: these only")
    parser.add_argument("--draw", type=int, metavar="COUNT", help="draw so many runs")
    parser.add_argument("--seed", type=int, default=1, help="of --draw")
    parser.add_argument("--flavour", choices=flavours(), default=flavours()[0], help="Keras of the workers")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--optimizer", help="default: the case's first")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shares", default="", help="rows per rank, for example 5,3,0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="pairs of workers, with --table")
    parser.add_argument("--no-gradients", action="store_true", help="do not fetch gradients")
    parser.add_argument("--scope", default="", help="replica, split:2, auto:2, split+zero3, stage:2, +micro:4 or +xla")
    options = parser.parse_args()
    cases = [case_named(name) for name in options.case] if options.case else list(CASES)
    if options.table:
        if options.under_split:
            return full(options.table, runs_under_split(cases, flavours()[0]), options.jobs)
        runs = [run for flavour in flavours() for run in all_runs(cases, flavour)]
        return full(options.table, runs, options.jobs)
    if options.draw:
        return drawn(draw_runs(cases, flavours(), options.draw, options.seed), options.seed)
    if not options.case:
        parser.error("give --case, --table or --draw")
    shares = tuple(int(part) for part in options.shares.split(",") if part)
    spread = Spread(options.ranks, shares)
    failed = False
    with Pool() as pool:
        for case in cases:
            optimizer = options.optimizer or case.optimizers[0]
            run = Run(
                case, case.name, options.flavour, options.dtype, optimizer, spread,
                not options.no_gradients, options.scope,
            )  # fmt: skip
            outcome, problems = judged(pool, run)
            print(f"{run}: {'; '.join(problems) or 'as one device'}")
            if outcome:
                print(
                    f"  error {outcome.error:.2e} ({outcome.where}), limit {outcome.limit:.2e},"
                    f" split FLOPs {outcome.split_flops_fraction:.1%}, {outcome.logical_bytes:,} bytes/step,"
                    f" {outcome.seconds:.1f} s"
                )
            failed |= bool(problems)
    return int(failed)


def judged(pool: Pool, run: Run) -> tuple[Outcome | None, list[str]]:
    """The outcome and what is wrong with it; no outcome when a worker failed."""
    try:
        outcome = compare(pool, run)
    except AssertionError as error:
        return None, [str(error)]
    return outcome, outcome.problems(run)


def drawn(runs: list[Run], seed: int) -> int:
    """Runs one after the other, each a line, and prints why some are refused."""
    wrong, refused, worst = 0, Counter[str](), 0.0
    with Pool() as pool:
        for run in runs:
            outcome, problems = judged(pool, run)
            if outcome:
                worst = max(worst, outcome.error / outcome.limit)
            elif reason := refusal(problems[0]):
                refused[reason] += 1
                print(f"refused  {run.arguments}: {reason}", flush=True)
                continue
            wrong += bool(problems)
            said = "; ".join(problems) or (f"{outcome.error:.0e}" if outcome else "")
            print(f"{'WRONG' if problems else 'equal':7}  {run.arguments}: {said}", flush=True)
    for reason, count in refused.most_common():
        print(f"refused {count} times: {reason}")
    equal = len(runs) - wrong - refused.total()
    print(
        f"{len(runs)} runs, seed {seed}: {equal} as one device, {refused.total()} refused, {wrong} wrong;"
        f" the largest error is {worst:.1e} of its limit"
    )
    return int(wrong > 0)


def refusal(failure: str) -> str:
    """Returns what a worker's failure says if it is a refusal of Whale's; "" if it is another exception, or a fault."""
    raised = failure.rpartition("Traceback (most recent call last):")[2]
    said = re.search(r"(?m)^whale\.errors\.\w+: (.*)", raised)
    return said[1] if said and REPORT_FAULT not in failure else ""


def full(path: Path, runs: list[Run], jobs: int) -> int:
    """The full matrix; a failed run does not stop the others. ``jobs`` pairs of workers share the cases."""
    results: dict[Run, tuple[Outcome | None, list[str]]] = {}
    # A case stays with one pair of workers, which has its reference.
    cases = queue.SimpleQueue[list[Run]]()
    for _, of_case in itertools.groupby(runs, key=lambda run: (run.flavour, run.name)):
        cases.put(list(of_case))

    def work(progress: Progress, task: TaskID) -> None:
        with Pool() as pool:
            while not cases.empty():
                with contextlib.suppress(queue.Empty):
                    for run in cases.get_nowait():
                        results[run] = judged(pool, run)
                        progress.advance(task)
                        if wrong := "; ".join(results[run][1]):
                            progress.console.print(f"{run}: {wrong}", markup=False, highlight=False)

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as threads:
        task = progress.add_task("runs", total=len(runs))
        for done in [threads.submit(work, progress, task) for _ in range(jobs)]:
            done.result()
    outcomes = {run: results[run][0] for run in runs}
    refused = {run for run in runs if any(reason in text for reason in REFUSALS for text in results[run][1])}
    failures = {run: results[run][1] for run in runs if results[run][1] and run not in refused}
    path.write_text(table(outcomes, failures, refused))
    print(
        f"{len(runs) - len(failures) - len(refused)} of {len(runs) - len(refused)} runs as one device; table in {path}"
    )
    return int(bool(failures))


# Programs that wh.split refuses: the plan is none to compare.
REFUSALS = (
    "programs with loops or branches cannot be spread over groups of ranks",
    "nothing under a split scope can be divided",
)


def table(outcomes: dict[Run, Outcome | None], failures: dict[Run, list[str]], refused: Collection[Run] = ()) -> str:
    """The Markdown page."""
    under_split = any(run.scope for run in outcomes)
    columns = UNDER_SPLIT if under_split else [("", spread) for spread in SPREADS]
    columns = [c for c in columns if any((run.scope, run.spread) == c for run in outcomes)]
    written = "python -m tests.oracle --under-split` (`make oracle`)" if under_split else "make oracle`"
    about_columns = (
        " Everything of a case stands under `wh.split`: `split` over all ranks, `split:2` over groups of two ranks,"
        " which divide the batch among them. Cells with a dash are programs that are refused: loops and branches over"
        " groups of ranks, and where no variable has a dimension to cut."
        if under_split
        else ""
    )
    lines = [
        "# The oracle's matrix" + (" under wh.split" if under_split else ""),
        "",
        f"Written by `{written} with TensorFlow {tf.__version__}; do not edit. Every"
        " cell is the error of one run against one device: the largest of max|difference| / max(max|w|, learning rate"
        " x steps) over losses, metrics, gradients and weights. A column is a number of ranks and the rows of the batch"
        " of 8 that each has (as equal as possible when not given). The split FLOPs are the smallest share, among the"
        " plans with several ranks, of matrix-product and convolution FLOPs that are divided; the bytes are those that"
        " the plan for two ranks moves per step." + about_columns,
        "",
        f"{len(outcomes) - len(failures) - len(refused)} of {len(outcomes) - len(refused)} runs are as one device.",
        "",
        "| case | Keras | dtype | optimizer | limit | "
        f"{' | '.join(f'{scope} {spread}'.strip() for scope, spread in columns)} | split FLOPs | bytes/step |",
        "|---|---|---|---|---|" + "---|" * (len(columns) + 2),
    ]
    rows: dict[tuple[str, ...], dict[tuple[str, Spread], Run]] = {}
    for run in outcomes:
        rows.setdefault((run.name, run.flavour[-1], run.dtype, run.optimizer), {})[run.scope, run.spread] = run
    for key, row in rows.items():
        cells = []
        for column in columns:
            of_cell = row.get(column)
            outcome = outcomes[of_cell] if of_cell else None
            text = (
                f"{outcome.error:.0e}"
                if outcome
                else ""
                if of_cell is None
                else "-"
                if of_cell in refused
                else "failed"
            )
            cells.append(f"**{text}**" if of_cell in failures else text)
        known = [outcome for run in row.values() if (outcome := outcomes[run])]
        split = [o.split_flops_fraction for run in row.values() if (o := outcomes[run]) and run.spread.ranks > 1]
        two = outcomes.get(row[columns[0][0], Spread(2)]) if (columns[0][0], Spread(2)) in row else None
        facts = [f"{min(split):.0%}" if split else "-", f"{two.logical_bytes:,}" if two else "-"]
        limit = f"{known[0].limit:.0e}" if known else "-"
        lines.append(f"| {' | '.join([*key, limit, *cells, *facts])} |")
    if failures:
        lines += ["", "## Runs that are not as one device", ""]
        lines += [f"* {run}: {'; '.join(problems).splitlines()[-1]}" for run, problems in failures.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
