"""Starts programs alone and under plans, compares what they computed, and writes the table."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from tests.forkserver import plain_python, warm_python
from tests.outside.run import FLOAT64, NOISE, PLANS
from tests.saved_values import difference

ROOT = Path(__file__).resolve().parents[2]
UNSTABLE = "alone it is another program when its first weights are rounded otherwise"
ALONE = "alone"  # in place of a plan's name: the program does not run without Whale
COLUMNS = "| program | of | what is unusual | bits | "  # of the table, before those of the plans
LIMIT, ROUNDED_LIMIT = 1e-10, 1e-5  # in float64, and in float32
_NOISES = 10.0  # times as far from the reference as that is from itself with weights that are a little off
_MOST_NOISE = 1e-3  # of a program that can be compared
_SETTING = re.compile(r"^# (source|changed|environment|precision): *(.+)$", re.M)
_RUN = str(Path(__file__).with_name("run.py"))


@dataclass(frozen=True)
class Program:
    """A program of a folder, as its head describes it.

    Attributes:
      unusual: the first line of its docstring.
      source: where it comes from; changed: what was changed to shrink it.
      environment: variables that it needs; rounded: it computes in float32.
    """

    path: Path
    unusual: str = ""
    source: str = ""
    changed: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    rounded: bool = False

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Result:
    """A program under a plan beside itself alone.

    Attributes:
      difference: largest over all values and ranks, relative to the largest element of each; where: of which value.
      limit: below which it is equal.
      problem: the message with which it ended; "" if it did not.
      first_s: seconds of processor time of the first calls of its steps on rank 0; plain_first_s: alone, if several
        processes are ranks run right after them, else as it is kept.
      whole_s, plain_whole_s: of the whole program, without imports.
    """

    plan: str
    difference: float = float("nan")
    where: str = ""
    limit: float = LIMIT
    problem: str = ""
    first_s: float = 0.0
    plain_first_s: float = 0.0
    whole_s: float = 0.0
    plain_whole_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.problem and self.difference <= self.limit


def list_programs(folder: Path) -> list[Program]:
    """Returns the programs of a folder: its Python files, but for ``prelude.py``, which each of them imports first."""
    return [read_program(path) for path in sorted(folder.glob("*.py")) if path.name != "prelude.py"]


def read_program(path: Path) -> Program:
    """Returns what the head of a program says of it: its docstring, and comments ``# source: ...``."""
    text = path.read_text()
    said = dict(_SETTING.findall(text))
    unusual = (ast.get_docstring(ast.parse(text)) or "").splitlines()[:1]
    pairs = [pair.partition("=") for pair in said.get("environment", "").split()]
    return Program(
        path,
        unusual[0] if unusual else "",
        said.get("source", ""),
        said.get("changed", ""),
        tuple((name, value) for name, _, value in pairs),
        said.get("precision", "float64") != "float64",
    )


def find_alone(program: Program, folder: Path, kept: Path) -> str:
    """Does what ``run_alone`` does, or takes what it left in an earlier run of the same program from ``kept``."""
    sources = [program.path, program.path.with_name("prelude.py"), *sorted(Path(__file__).parent.glob("r*.py"))]
    digest = blake2b(b"".join(path.read_bytes() for path in sources if path.exists()), digest_size=8).hexdigest()
    files = {
        folder / f"plain-rank0.{end}": kept / "alone" / f"{program.name}-{digest}.{end}" for end in ("npz", "json")
    }
    if all(known.exists() for known in files.values()):
        for path, known in files.items():
            shutil.copyfile(known, path)
        return ""
    problem = run_alone(program, folder)
    if not problem:
        (kept / "alone").mkdir(parents=True, exist_ok=True)
        for path, known in files.items():
            shutil.copyfile(path, known)
    return problem


def run_alone(program: Program, folder: Path) -> str:
    """Runs a program in a process that never imports whale; returns its message if it failed."""
    done = _run([plain_python(), _RUN, str(program.path), str(folder), "plain"], program)
    if done.returncode:
        return _last_lines(done.stderr)
    seconds = json.loads((folder / "plain-rank0.json").read_text())
    return "" if seconds["first"] else "it takes no step of tf.function or Keras"


def compare(program: Program, plan: str, folder: Path) -> Result:
    """Runs a program under a plan, and compares it with what ``run_alone`` left in the folder."""
    ranks = PLANS[plan][0]
    launcher = ["-m", "whale", "run", "-np", str(ranks)] if ranks > 1 else []
    done = _run([warm_python(), *launcher, _RUN, str(program.path), str(folder), plan], program)
    if done.returncode:
        return Result(plan, problem=_last_lines(done.stdout + done.stderr))
    files = [folder / f"{plan}-rank{rank}.npz" for rank in range(ranks)]
    found = difference(folder / "plain-rank0.npz", files)
    limit = ROUNDED_LIMIT if program.rounded else LIMIT
    if not found.problem and not found.largest <= limit:
        noise = _measure_noise(program, folder)
        if noise > _MOST_NOISE:
            return Result(plan, found.largest, found.where, problem=f"{UNSTABLE}, by {noise:.0e}: {found.where}")
        limit = max(limit, _NOISES * noise)
    # What was kept of the program alone may be of an hour when the machine did other things.
    beside = folder / "beside"
    beside.mkdir(exist_ok=True)
    timed = folder if ranks == 1 or run_alone(program, beside) else beside
    mine, plain = (json.loads(path.read_text()) for path in (folder / f"{plan}-rank0.json", timed / "plain-rank0.json"))
    return Result(
        plan, found.largest, found.where, limit, found.problem,
        mine["first"], plain["first"], mine["whole"], plain["whole"],
    )  # fmt: skip


def _measure_noise(program: Program, folder: Path) -> float:
    """Returns how far the program alone is from itself where its first weights are rounded otherwise."""
    again = folder / "noise"
    if not (again / "plain-rank0.npz").exists():
        again.mkdir(exist_ok=True)
        done = _run([plain_python(), _RUN, str(program.path), str(again), "plain"], program, {NOISE: "1"})
        if done.returncode:
            return 0.0
    return difference(folder / "plain-rank0.npz", [again / "plain-rank0.npz"]).largest


def _run(
    command: Sequence[str], program: Program, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path}
    known = {**os.environ, **quiet, **dict(program.environment), **(more or {})}
    if not program.rounded:
        known[FLOAT64] = "1"
    try:
        return subprocess.run(command, env=known, cwd=ROOT, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "longer than 900 s")


def _last_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())[-3000:]


def save_results(program: Program, results: Sequence[Result], folder: Path) -> None:
    """Keeps what was found, for the table."""
    folder.mkdir(exist_ok=True)
    (folder / f"{program.name}.json").write_text(json.dumps([asdict(one) for one in results], indent=1))


def read_results(program: Program, folder: Path) -> list[Result]:
    """Returns what was kept of a program; nothing if it was not run, or was changed since."""
    path = folder / f"{program.name}.json"
    if not path.exists() or path.stat().st_mtime < program.path.stat().st_mtime:
        return []
    return [Result(**one) for one in json.loads(path.read_text())]


def format_row(program: Program, results: Sequence[Result]) -> str:
    """Returns the program's line of the table."""
    by_plan = {one.plan: one for one in results}
    cells = [_format_cell(by_plan.get(plan)) for plan in PLANS]
    times, timed = "| | |", by_plan.get("replica")
    if timed is not None and not timed.problem:
        ratio = timed.first_s / max(timed.plain_first_s, 1e-9)
        times = f"| {timed.plain_first_s:.1f} | {timed.first_s:.1f} | {ratio:.1f} |"
    cells_text = " | ".join(cells)
    precision = "32" if program.rounded else "64"
    return f"| {program.name} | {program.source} | {program.unusual} | {precision} | {cells_text} {times}\n"


def format_reasons(program: Program, results: Sequence[Result]) -> str:
    """Returns a line for each plan under which the program ended with a message: the message's sentences."""
    lines = ""
    for one in results:
        if one.plan != ALONE and one.problem:
            said = " ".join(one.problem.split())
            start = max((found.start() for found in re.finditer(r"\w+Error: ", said)), default=-300)
            lines += f"* {program.name}, {one.plan}: {said[start:][:500]}\n"
    return lines


def merge_lines(before: str, start: str, lines: str, here: Container[str]) -> str:
    """Returns the lines, and among them those of an earlier table that begin so and are of other programs."""
    earlier = [line for line in before.splitlines(keepends=True) if line.startswith(start)]
    kept = [line for line in earlier if _find_name(line) not in here and not line.startswith(COLUMNS)]
    return "".join(sorted([*kept, *lines.splitlines(keepends=True)], key=_find_name))


def _find_name(line: str) -> str:
    """Returns the name of the program of a row, or of a reason."""
    return re.split(r"[ ,]", line[2:], maxsplit=1)[0]


def _format_cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.problem.startswith(UNSTABLE):
        return "unstable"
    if result.problem:
        return "refused" if "Error: " in result.problem else "**failed**"
    return f"{result.difference:.0e}" if result.is_equal else f"**{result.difference:.0e}**"
