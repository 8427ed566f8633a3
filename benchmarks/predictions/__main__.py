"""Predicted against measured step time and memory of this machine's own runs: seven programs under every plan.

    python -m benchmarks.predictions --profile PROFILE [--programs mlp,gpt] [--rows FILE] [--out docs]
    python -m benchmarks.predictions --rows FILE --out docs        reports rows that were measured before

For each program its operations are measured and all plans predicted; then every plan runs, round after round, one plan
after the other, while the others' processes are stopped. Time: the median over all steps of the slowest rank's.
Memory: the most bytes that tensors and kernels of any rank ask TensorFlow's allocator for at a time, in 100 steps
(tensors of 256 KiB and more, which is what it serves). What it gives comes in larger pieces, and where they lie is
chance; the largest peak in such pieces is compared as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.groups import Group, thread_variables, under_mpirun
from benchmarks.machine import Pace, busy_s
from benchmarks.predictions import page
from benchmarks.predictions.plans import KINDS

PROGRAMS = ("mlp", "convnet", "gpt", "vit", "dlrm", "classifier", "lstm")
STEP_TIMEOUT_S = 60.0
TRIES = 10  # of a round, as long as it is disturbed:
DISTURBED = 0.15  # the part of a core that others took, and by what part the machine is slower than at its best
CLOSE = 0.02  # plans whose measured times differ by less have no order


@dataclass(frozen=True)
class Seen:
    """What a run took: seconds of each step, most bytes asked for at a time, and in the allocator's pieces."""

    steps_s: list[float]
    asked_bytes: float
    piece_bytes: float


@dataclass(frozen=True)
class Row:
    """One run: seconds and bytes, predicted and measured."""

    program: str
    plan: str
    predicted_s: float
    steps_s: list[float]
    predicted_bytes: float
    measured_bytes: float
    predicted_piece_bytes: float
    measured_piece_bytes: float

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def piece_error(self) -> float:
        return self.predicted_piece_bytes / self.measured_piece_bytes - 1

    def apart(self, other: Row) -> bool:
        """Whether the middle halves of both runs' steps do not overlap."""
        (low, _, high), (other_low, _, other_high) = (statistics.quantiles(r.steps_s, n=4) for r in (self, other))
        return high < other_low or other_high < low


def foresee(program: str, profile: Path) -> dict[str, Any]:
    """Predictions of a program under every plan, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        environment = {**os.environ, **thread_variables(1), "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-m", "benchmarks.predictions.foresee", program, str(profile), str(out)]
        subprocess.run(command, check=True, env=environment)
        return json.loads(out.read_text())


def measure(program: str, kinds: Sequence[str], rounds: int, steps: int, pace: Pace) -> dict[str, Seen]:
    """Kind -> what its run took."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    asked: dict[str, list[float]] = {kind: [] for kind in kinds}
    pieces: dict[str, list[float]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        groups = {}
        for kind in kinds:
            ranks = KINDS[kind].ranks
            line = under_mpirun([sys.executable, "-m", "benchmarks.predictions.worker", kind, program], ranks)
            groups[kind] = stack.enter_context(Group(kind, line, ranks, thread_variables(1)))
        for number in range(-1, rounds):
            for kind, group in groups.items():
                answers = _undisturbed(group, steps, pace)
                if number >= 0:
                    times[kind] += map(max, zip(*(a["times_s"] for a in answers)))
                    asked[kind] += [a["asked_bytes"] for a in answers]
                    pieces[kind] += [a["peak_bytes"] for a in answers]
    return {kind: Seen(times[kind], max(asked[kind]), max(pieces[kind])) for kind in kinds}


def _undisturbed(group: Group, steps: int, pace: Pace) -> list[dict[str, Any]]:
    """What the ranks answer, of the first round in which nobody else slowed them down, or of the best one."""
    found: list[tuple[float, list[dict[str, Any]]]] = []
    while len(found) < TRIES and (not found or found[-1][0] > DISTURBED):
        before = pace.slower()
        taken_s, start_s = busy_s(), time.monotonic()
        answers = group.ask(STEP_TIMEOUT_S * steps, steps=steps)
        others_s = busy_s() - taken_s - sum(a["cpu_s"] for a in answers)
        others = others_s / (time.monotonic() - start_s)
        found.append((max(0.0, others) + max(before, pace.slower()), answers))
    return min(found, key=lambda one: one[0])[1]


def _settled(pace: Pace) -> None:
    """Waits until the machine is as fast as it was at its best, for a minute at most."""
    end_s = time.monotonic() + 60
    while pace.slower() > DISTURBED and time.monotonic() < end_s:
        time.sleep(1)


def report(rows: Sequence[Row]) -> str:
    """A line per run, then one line of errors and of order."""
    lines = [f"{'program':<12}{'plan':<22}{'predicted ms':>13}{'measured':>10}{'error %':>9}"
             f"{'predicted MB':>14}{'measured':>10}{'error %':>9}"]  # fmt: skip
    for r in rows:
        lines.append(
            f"{r.program:<12}{r.plan:<22}{1e3 * r.predicted_s:13.1f}{1e3 * r.measured_s:10.1f}"
            f"{100 * r.time_error:+9.1f}{r.predicted_bytes / 1e6:14.1f}{r.measured_bytes / 1e6:10.1f}"
            f"{100 * r.memory_error:+9.1f}"
        )
    ordered, apart = list[bool](), list[bool]()
    for _, group in itertools.groupby(rows, key=lambda r: r.program):
        for one, other in itertools.combinations(list(group), 2):
            if abs(one.measured_s / other.measured_s - 1) >= CLOSE:
                ordered.append((one.predicted_s < other.predicted_s) == (one.measured_s < other.measured_s))
                apart += ordered[-1:] if one.apart(other) else []
    time, memory, pieces = ([100 * abs(e) for e in errors] for errors in
                            ([r.time_error for r in rows], [r.memory_error for r in rows],
                             [r.piece_error for r in rows]))  # fmt: skip
    lines.append(
        f"{len(rows)} runs: time MAPE {statistics.mean(time):.2f} %, maximum {max(time):.2f} %; "
        f"memory MAPE {statistics.mean(memory):.2f} %, maximum {max(memory):.2f} %, "
        f"furthest under {100 * min(r.memory_error for r in rows):+.2f} % "
        f"(in the allocator's pieces {statistics.mean(pieces):.2f} %, "
        f"furthest under {100 * min(r.piece_error for r in rows):+.2f} %); "
        f"order right in {sum(ordered)} of {len(ordered)} pairs "
        f"({sum(apart)} of the {len(apart)} whose middle halves of steps do not overlap)"
    )
    return "\n".join(lines)


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", type=Path, help="of `whale profile`, which runs if it is missing; completed")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--plans", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="steps of a round")
    parser.add_argument("--rows", type=Path, help="JSON file that keeps rows of several calls together")
    parser.add_argument("--out", type=Path, help="folder that receives predictions.md and predictions.svg")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="only draw the figure of the page there anew")
    options = parser.parse_args()
    if options.redraw:
        page.draw(page.read_table((options.redraw / "predictions.md").read_text()), options.redraw / "predictions.svg")
        return
    if options.profile is None and options.rows is None:
        parser.error("there is nothing to report: --profile measures, --rows has what was measured before")
    rows: list[Row] = []
    if options.rows and options.rows.exists():
        rows = [Row(**row) for row in json.loads(options.rows.read_text())]
    if options.profile and not options.profile.exists():
        subprocess.run([sys.executable, "-m", "whale", "profile", "-o", str(options.profile)], check=True)
    pace = Pace()
    for program in options.programs.split(",") if options.profile else ():
        _settled(pace)
        found = foresee(program, options.profile)
        wanted = [kind for kind in options.plans.split(",") if "refused" not in found[kind]]
        for kind, why in found.items():
            if "refused" in why:
                print(f"{program}: {KINDS[kind].title} is refused: {why['refused']}", flush=True)
        measured = measure(program, wanted, options.rounds, options.steps, pace)
        rows = [r for r in rows if r.program != program]
        for kind in wanted:
            predicted = found[kind]
            asked, pieces = (max(rank[what] for rank in predicted["ranks"]) for what in ("asked_bytes", "peak_bytes"))
            seen, title = measured[kind], KINDS[kind].title
            memory = (asked, seen.asked_bytes, pieces, seen.piece_bytes)
            rows.append(Row(program, title, predicted["step_s"], seen.steps_s, *memory))
        print(report([r for r in rows if r.program == program]), flush=True)
        if options.rows:
            options.rows.write_text(json.dumps([asdict(row) for row in rows]))
    print(report(rows))
    if options.out:
        page.write(report(rows), options.out)


if __name__ == "__main__":
    main()
