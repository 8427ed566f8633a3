"""What it costs to be ready to go on without a rank: step times with and without `elastic`, in one interleaved run.

    python -m benchmarks.elastic [--model gpt resnet50] [--ranks 2] [--rounds 9] [--steps 5]

Replicas keep nothing for it but the order of updates; with `zero.level=3` each rank also keeps its values from before
the step, and those that another one alone holds. Every row is a process group under `whale run` that stays alive; in
each round each group runs some steps, while the others are stopped. Shown are medians of a round's mean and of the
processor time of a step, all ranks together, and the ratio to the row without `elastic`, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.groups import Answer, Group, serve
from benchmarks.machine import machine

TIMEOUT_S = 300.0
LEVELS = (0, 3)


def worker(name: str, level: int, elastic: bool) -> None:
    """One process of a row."""

    def start() -> tuple[Answer, Callable[[], None]]:
        import whale as wh
        from benchmarks.step_time.models import WORKLOADS, make_step

        # Stopped by the benchmark, a process is not frozen.
        wh.init({"elastic": elastic, "elastic.rebalance": False, "zero.level": level, "fault.freeze_s": 0})
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="*", default=["gpt", "resnet50"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--levels", nargs="*", type=int, default=LEVELS, metavar="ZERO_LEVEL")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    print(machine())
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
    print("| zero.level | elastic | step, ms | processor, ms | step, ratio | processor, ratio |")
    print("|---|---|---|---|---|---|")
    for level, elastic in rows:
        times, plain = found[level, elastic], found[level, False]
        medians = [statistics.median(values) for values in zip(*times)]
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(times, plain)) for i in (0, 1)]
        print(f"| {level} | {elastic} | {medians[0]:.1f} | {medians[1]:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")


if __name__ == "__main__":
    main()
