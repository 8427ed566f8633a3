"""Predicts how programs scale to more ranks, with measured costs, and measures the processor time of real ranks.

    whale profile -np 2 -o profile.json
    python -m benchmarks.predictions.scaling --profile profile.json [--programs mlp,gpt] [--ranks 1 2 4 8 16]

Data parallel, on one host with a core for each rank. Strong scaling: the batch stays, and is divided. Weak: each rank
keeps the rows of the whole batch. What a rank computes is measured on this machine, one rank alone on its core; the
exchanges are predicted from the profile's, and the ranks are simulated together. That cores share the memory's
bandwidth is in the exchanges, not in what they compute, so that speed-ups are upper bounds. ``--processes`` starts so
many ranks here, whatever the number of cores, and says the processor time of a step of all of them together: what more
ranks take more of it is done more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.groups import Answer, Group, serve, thread_variables, under_mpirun

PROGRAMS = ("mlp", "convnet", "gpt", "vit", "dlrm", "lstm", "classifier")
STOPS = 1.3  # scaling has stopped where twice the ranks are less than so many times as fast
_ROUNDS, _STEPS, _STEP_TIMEOUT_S, _OPERATIONS_S = 3, 3, 300.0, 120.0


class Point(msgspec.Struct):
    """Seconds of a step on so many ranks, and of one rank's kernels and exchanges in it."""

    ranks: int
    step_s: float
    compute_s: float
    exchange_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", required=True, type=Path, help="written by whale profile")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4, 8, 16))
    parser.add_argument("--processes", type=int, nargs="*", default=(1, 2, 4, 8))
    parser.add_argument("--foresee", metavar="OUT", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.programs)
        return
    if options.foresee:
        Path(options.foresee).write_bytes(
            msgspec.json.encode(foresee(options.programs, options.profile, options.ranks))
        )
        return
    titles = "ranks | strong: ms a step | speed-up | exchanges, ms | weak: ms a step | efficiency | processor ms"
    print(f"| program | {titles} |")
    print("|---|---|---|---|---|---|---|---|")
    for program in options.programs.split(","):
        strong, weak = predict(program, options)
        taken = processor_s(program, options.processes)
        for one, wide in zip(strong, weak):
            cpu = f"{1e3 * taken[one.ranks]:.0f}" if one.ranks in taken else ""
            print(
                f"| {program} | {one.ranks} | {1e3 * one.step_s:.1f} | {strong[0].step_s / one.step_s:.2f} | "
                f"{1e3 * one.exchange_s:.1f} | {1e3 * wide.step_s:.1f} | {weak[0].step_s / wide.step_s:.2f} | {cpu} |",
                flush=True,
            )
        print(f"{program}: {explain(strong)}", flush=True)


def explain(strong: Sequence[Point]) -> str:
    """Says up to how many ranks a fixed batch gains, and what a step consists of where it stops."""
    for one, more in itertools.pairwise(strong):
        if one.step_s < STOPS * more.step_s:
            computing, exchanging = more.compute_s / more.step_s, more.exchange_s / more.step_s
            kept = more.compute_s / strong[0].compute_s
            return (
                f"little gained from {one.ranks} to {more.ranks} ranks: a rank then computes for {computing:.0%} of "
                f"the step, {kept:.0%} of what one rank alone computes, and exchanges for {exchanging:.0%}"
            )
    return f"gains up to {strong[-1].ranks} ranks"


def predict(program: str, options: argparse.Namespace) -> tuple[list[Point], list[Point]]:
    """Returns the points of strong and of weak scaling, from a process of its own with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "points.json")
        command = [sys.executable, "-m", "benchmarks.predictions.scaling", "--profile", str(options.profile)]
        command += ["--programs", program, "--foresee", str(out), "--ranks", *map(str, sorted(set(options.ranks)))]
        environment = {**os.environ, **thread_variables(1), "TF_CPP_MIN_LOG_LEVEL": "2"}
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        return msgspec.json.decode(out.read_bytes(), type=tuple[list[Point], list[Point]])


def foresee(name: str, profile: Path, ranks: Sequence[int]) -> tuple[list[Point], list[Point]]:
    """Measures what a rank of each number of ranks computes, and predicts the steps."""
    from benchmarks.predictions.foresee import plan_workload
    from benchmarks.predictions.models import WORKLOADS
    from cost_model.graph import machine_profile as tables
    from cost_model.graph.machine import make_measured_machine
    from cost_model.graph.machine_profile import Step
    from cost_model.graph.predict import predict_ranks
    from whale.ir.fingerprint import compute_fingerprint
    from whale.planner.graph_search.plan_prediction import rank_programs
    from whale.tools.profile import operations
    from whale.tools.profile.profile import remove_exchanges
    from whale.tools.profile.steps import measure_step_seconds

    def lower(count: int, rows: int) -> list[Any]:
        return rank_programs(plan_workload(replace(WORKLOADS[name], batch=rows), count))

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # and the processes that measure: a core for each rank
    whole = WORKLOADS[name].batch
    strong = {count: lower(count, whole) for count in ranks}
    weak = {count: lower(count, whole * count) for count in ranks}
    each = [*strong.values(), *weak.values()]
    table = tables.read(profile)
    known = {o.signature for o in table.operations}
    distinct = operations.find_distinct([programs[0] for programs in each])
    found, _ = operations.measure([one for key, one in distinct.items() if key not in known], _OPERATIONS_S, print)
    table = table.merge(found)
    alone = [[remove_exchanges(programs[0])] for programs in each]
    seconds = [max(1e-6, s - table.call_s) for s in measure_step_seconds(alone)]

    def play(programs: list[Any], computed: list[Any], step_s: float) -> Point:
        one = msgspec.structs.replace(table, cores=1.0)
        guessed = predict_ranks(computed, make_measured_machine(one, 1), plays=0).step_s
        marked = Step(compute_fingerprint(programs[0]), step_s, guessed, len(programs))
        here = msgspec.structs.replace(table, cores=float(len(programs))).merge((), [marked])
        got = predict_ranks(programs, make_measured_machine(here, len(programs)))
        return Point(len(programs), got.step_s, got.ranks[0].compute_s, got.ranks[0].exchange_s)

    points = [play(*one) for one in zip(each, alone, seconds)]
    return points[: len(strong)], points[len(strong) :]


def processor_s(program: str, processes: Sequence[int]) -> dict[int, float]:
    """Returns the processor seconds of a step of all ranks together, by their number; the groups step in turn."""
    samples: dict[int, list[float]] = {count: [] for count in processes}
    with contextlib.ExitStack() as stack:
        groups = {}
        for count in processes:
            line = [sys.executable, "-m", "benchmarks.predictions.scaling", "--worker", "--profile", "-"]
            line = under_mpirun([*line, "--programs", program], count)
            groups[count] = stack.enter_context(Group(f"{count} ranks", line, count, thread_variables(1)))
        for number in range(-1, _ROUNDS):
            for count, group in groups.items():
                answers = group.ask(_STEP_TIMEOUT_S * _STEPS, steps=_STEPS)
                if number >= 0:
                    samples[count].append(sum(one["cpu_s"] for one in answers) / _STEPS)
    return {count: statistics.median(each) for count, each in samples.items()}


def work(program: str) -> None:
    """Runs one rank whose processor time is measured."""

    def start() -> tuple[Answer, Callable[[], None]]:
        import time

        import whale as wh
        from benchmarks.predictions.models import WORKLOADS, make_step

        wh.init()
        step, batch = make_step(WORKLOADS[program], wh.function, contextlib.nullcontext)
        for _ in range(3):
            float(step(*batch))

        def answer(steps: int) -> dict[str, Any]:
            before_s = time.process_time()
            for _ in range(steps):
                loss = float(step(*batch))
            return {"cpu_s": time.process_time() - before_s, "loss": loss}

        return answer, wh.shutdown

    serve(int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), start)


if __name__ == "__main__":
    main()
