"""What it costs to be ready to go on without a rank: step times with and without `elastic`, in one interleaved run.

    python -m benchmarks.elastic [--model gpt resnet50] [--ranks 2] [--rounds 9] [--steps 5]
    python -m benchmarks.elastic rebalance [--cuts 5] [--rows 3072]          how soon rows follow a quota that is cut

Replicas keep nothing for it but the order of updates; with `memory.zero=3` each rank also keeps its values from before
the step, and those that another one alone holds. Every row is a process group under `whale run` that stays alive; in
each round each group runs some steps, while the others are stopped. Shown are medians of a round's mean and of the
processor time of a step, all ranks together, and the ratio to the row without `elastic`, round by round.

`rebalance` halves the last rank's quota of processor time, and gives it back, in the middle of a run (Linux, as root).
It counts the steps until the step time is within 5 % of the ideal: of the first steps' time, by what the speeds add up
to then and now. The step that compiles the new division is one of them. What a rank does is limited by its quota, a
part of a core, so that what else the machine does matters little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.groups import Answer, Group, serve
from benchmarks.machine import machine
from benchmarks.quota import Quota, groups
from benchmarks.unequal import program

TIMEOUT_S = 300.0
LEVELS = (0, 3)
PERIOD_US = 10_000  # in which a quota is used up and given anew
DEPTH = 4  # layers of the program whose rows follow
NEAR, MEDIAN_OF = 1.05, 5  # of the ideal; steps, of which the median has to be so near
SETTLED, BETWEEN = 40, (40, 55)  # steps before the first change, and between two


def worker(name: str, level: int, elastic: bool) -> None:
    """One process of a row."""

    def start() -> tuple[Answer, Callable[[], None]]:
        import whale as wh
        from benchmarks.step_time.models import WORKLOADS
        from benchmarks.step_time.training import make_step

        # Stopped by the benchmark, a process is not frozen.
        wh.init(
            {
                "fault.elastic": "memory" if elastic else "",
                "fault.rebalance": False,
                "memory.zero": level,
                "fault.freeze_s": 0,
            }
        )
        step = make_step(WORKLOADS[name], wh.function)

        def answer(steps: int) -> dict[str, Any]:
            step()  # in the caches is what this row uses
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            return {
                "step_ms": 1e3 * (time.perf_counter() - begun_s) / steps,
                "cpu_ms": 1e3 * (time.process_time() - cpu_s) / steps,
            }

        return answer, wh.shutdown

    serve(int(os.environ["WHALE_RANK"]), start)


def rebalanced(ranks: int, rows: int, cuts: int, cores: float) -> None:
    """One rank, whose last one's quota is cut, and given back, so often."""
    rank = int(os.environ["WHALE_RANK"])
    quota = Quota(rank, PERIOD_US)
    quota.be_first()
    quota.join()
    here = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here[rank % len(here)]})
    import whale as wh

    wh.init({"fault.elastic": "memory"})
    step, batch = program(DEPTH, wh.function, rows)
    turns = random.Random(1)  # the same on all ranks
    times_s: list[list[float]] = []
    for change in range(2 * cuts + 1):
        quota.set(cores / 2 if rank == ranks - 1 and change % 2 else cores)
        times_s.append([])
        for _ in range(turns.randint(*BETWEEN) if change else SETTLED):
            begun_s = time.perf_counter()
            float(step(*batch))
            times_s[-1].append(time.perf_counter() - begun_s)
    wh.shutdown()
    if rank == 0:
        tell_rebalanced(times_s, ranks, rows)


def tell_rebalanced(times_s: Sequence[Sequence[float]], ranks: int, rows: int) -> None:
    """Prints what became of each change; the first times are those before any."""
    before_s = statistics.median(times_s[0][-SETTLED // 2 :])
    print(f"{ranks} ranks, {rows} rows, steps of {1e3 * before_s:.0f} ms before; quota of rank {ranks - 1}:")
    print("| quota | ideal, ms | at once, ms | longest, ms | at the end, ms | steps until within 5 % |")
    print("|---|---|---|---|---|---|")
    counts = []
    for change, times in enumerate(times_s[1:]):
        ideal_s = before_s * (1.0 if change % 2 else ranks / (ranks - 0.5))
        medians = [statistics.median(times[i : i + MEDIAN_OF]) for i in range(len(times) - MEDIAN_OF + 1)]
        steps = next((i for i, median_s in enumerate(medians) if median_s <= NEAR * ideal_s), None)
        counts.append(len(times) if steps is None else steps)
        said = [ideal_s, statistics.median(times[1:4]), max(times), medians[-1]]
        shown = " | ".join(f"{1e3 * s:.0f}" for s in said)
        print(f"| {'given back' if change % 2 else 'halved'} | {shown} | {'never' if steps is None else steps} |")
    print(f"steps: median {statistics.median(counts):g}, most {max(counts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("cost", "rebalance"), default="cost")
    parser.add_argument("--cuts", type=int, default=5, help="of the quota, for rebalance")
    parser.add_argument("--rows", type=int, default=3072, help="of its batch")
    parser.add_argument("--cores", type=float, default=0.6, help="of a core, for each rank of it")
    parser.add_argument("--model", nargs="*", default=["gpt", "resnet50"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--levels", nargs="*", type=int, default=LEVELS, metavar="ZERO_LEVEL")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        act: Callable[..., None] = worker if options.what == "cost" else rebalanced
        act(*options.worker)
        return
    print(machine(), flush=True)
    if options.what == "rebalance":
        asked = json.dumps([options.ranks, options.rows, options.cuts, options.cores])
        line = [sys.executable, "-m", "whale", "run", "-np", str(options.ranks), "--threads", "1"]
        with groups(options.ranks, PERIOD_US):
            line += ["-m", "benchmarks.elastic", "rebalance", "--worker", asked]
            sys.exit(subprocess.run(line, check=False).returncode)
    for name in options.model:
        compare(name, options.ranks, options.levels, options.rounds, options.steps)


def compare(name: str, ranks: int, levels: Sequence[int], rounds: int, steps: int) -> None:
    """Prints the rows of a model."""
    rows = [(level, elastic) for level in levels for elastic in (False, True)]
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {row: [] for row in rows}
    with contextlib.ExitStack() as stack:
        groups = {}
        for level, elastic in rows:
            asked = json.dumps([name, level, elastic])
            line = [
                sys.executable,
                "-m",
                "whale",
                "run",
                "-np",
                str(ranks),
                "-m",
                "benchmarks.elastic",
                "--worker",
                asked,
            ]
            groups[level, elastic] = stack.enter_context(Group(asked, line, ranks, {}))
        for number in range(rounds + 1):
            for row in rows if number % 2 else rows[::-1]:
                answers = groups[row].ask(TIMEOUT_S, steps=steps)
                if number:  # the first round compiles
                    found[row].append((max(a["step_ms"] for a in answers), sum(a["cpu_ms"] for a in answers)))
    print(f"\n{name}, {ranks} ranks, {rounds} rounds of {steps} steps")
    print("| memory.zero | elastic | step, ms | processor, ms | step, ratio | processor, ratio |")
    print("|---|---|---|---|---|---|")
    for level, elastic in rows:
        times, plain = found[level, elastic], found[level, False]
        medians = [statistics.median(values) for values in zip(*times)]
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(times, plain)) for i in (0, 1)]
        print(f"| {level} | {elastic} | {medians[0]:.1f} | {medians[1]:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")


if __name__ == "__main__":
    main()
