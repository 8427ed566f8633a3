"""Runs the oracle by hand.

python -m tests.oracle --case mlp --dtype float64 --optimizer sgd --ranks 3 --shares 5,3,0
python -m tests.oracle --table docs/oracle.md        # the full matrix of this TensorFlow
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf
from rich.progress import MofNCompleteColumn, Progress, TaskID

from tests.oracle.compare import Outcome, compare
from tests.oracle.matrix import SPREADS, Run, Spread, all_runs
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import CASES, case_named


def main() -> int:
    """Returns the exit code: 1 when a run is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, help="run the full matrix and write its table to this file")
    parser.add_argument("--case", action="append", help="case of the zoo (repeatable); with --table: these only")
    parser.add_argument("--flavour", choices=flavours(), default=flavours()[0], help="Keras of the workers")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--optimizer", help="default: the case's first")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shares", default="", help="rows per rank, for example 5,3,0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="pairs of workers, with --table")
    parser.add_argument("--no-gradients", action="store_true", help="do not fetch gradients")
    parser.add_argument("--scope", default="", help="what the model is inside: replica, split:2, auto, split+zero3")
    options = parser.parse_args()
    cases = [case_named(name) for name in options.case] if options.case else list(CASES)
    if options.table:
        runs = [run for flavour in flavours() for run in all_runs(cases, flavour)]
        return full(options.table, runs, options.jobs)
    if not options.case:
        parser.error("give --case or --table")
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
    failures = {run: results[run][1] for run in runs if results[run][1]}
    path.write_text(table(outcomes, failures))
    print(f"{len(runs) - len(failures)} of {len(runs)} runs as one device; table in {path}")
    return int(bool(failures))


def table(outcomes: dict[Run, Outcome | None], failures: dict[Run, list[str]]) -> str:
    """The Markdown page."""
    spreads = [spread for spread in SPREADS if any(run.spread == spread for run in outcomes)]
    lines = [
        "# The oracle's matrix",
        "",
        f"Written by `make oracle` with TensorFlow {tf.__version__}; do not edit. Every"
        " cell is the error of one run against one device: the largest of max|difference| / max(max|w|, learning rate"
        " x steps) over losses, metrics, gradients and weights. A column is a number of ranks and the rows of the batch"
        " of 8 that each has (as equal as possible when not given). The split FLOPs are the smallest share, among the"
        " plans with several ranks, of matrix-product and convolution FLOPs that are divided; the bytes are those that"
        " the plan for two ranks moves per step.",
        "",
        f"{len(outcomes) - len(failures)} of {len(outcomes)} runs are as one device.",
        "",
        f"| case | Keras | dtype | optimizer | limit | {' | '.join(map(str, spreads))} | split FLOPs | bytes/step |",
        "|---|---|---|---|---|" + "---|" * (len(spreads) + 2),
    ]
    rows: dict[tuple[str, ...], dict[Spread, Outcome | None]] = {}
    for run, outcome in outcomes.items():
        rows.setdefault((run.name, run.flavour[-1], run.dtype, run.optimizer), {})[run.spread] = outcome
    wrong = {(run.name, run.flavour[-1], run.dtype, run.optimizer, run.spread) for run in failures}
    for key, row in rows.items():
        cells = []
        for spread in spreads:
            outcome = row.get(spread)
            text = f"{outcome.error:.0e}" if outcome else "failed" if spread in row else ""
            cells.append(f"**{text}**" if (*key, spread) in wrong else text)
        known = [outcome for outcome in row.values() if outcome]
        split = [o.split_flops_fraction for s, o in row.items() if o and s.ranks > 1]
        two = row.get(Spread(2))
        facts = [f"{min(split):.0%}" if split else "-", f"{two.logical_bytes:,}" if two else "-"]
        limit = f"{known[0].limit:.0e}" if known else "-"
        lines.append(f"| {' | '.join([*key, limit, *cells, *facts])} |")
    if failures:
        lines += ["", "## Runs that are not as one device", ""]
        lines += [f"* {run}: {'; '.join(problems).splitlines()[-1]}" for run, problems in failures.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
