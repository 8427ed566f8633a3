"""Faults at random moments of a run: whatever happens, an error in time or the right weights, and nothing left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.launcher.helpers import ROOT, Launcher

# What happens to whom -> the exit codes of `whale run` without restarts, and how its last line goes on.
KINDS: dict[str, tuple[tuple[int, ...], str]] = {
    "rank killed": ((137,), "rank {victim} was killed by SIGKILL"),
    "rank crashes": ((139,), "rank {victim} was killed by SIGSEGV"),
    "rank stopped": ((1,), "rank {victim} is frozen"),
    "rank exits": ((3,), "rank {victim} failed: exit code 3"),
    "rank leaves": ((1,), ".*rank {victim} has ended (without|inside)"),
    "rank raises": ((1,), "rank {victim} failed: ValueError: this batch is bad"),
    "rank ends": ((3,), "rank {victim} failed: exit code 3"),
    "rank closes": ((1, 134, 139), "rank {victim} "),
    "worker killed": ((1,), "rank {victim} was lost"),
    "worker stopped": ((1,), "rank {victim} is frozen"),
    "mpirun killed": ((1,), "mpirun was killed by SIGKILL"),
    "mpirun stopped": ((1,), "mpirun is frozen"),
    "launcher killed": ((-9,), ""),
    "launcher stopped": ((0,), ""),
}
PHASES = {"start": 0.5, "capture": 0.3, "first step": 0.3, "training": 0.1, "save": 0.03, "shutdown": 0.03}
# How the model is spread; "exchange": no model, only sums of the core, which starts in a tenth of the time.
PLANS = ("replica", "zero", "stages")
_EXCHANGE_PHASES = ("start", "training", "shutdown")
# Seconds from the fault to the last error of another rank, and from there to the end of the run.
LIMIT_S, SILENT_LIMIT_S, END_S = 5.0, 10.0, 15.0
_STOPPED_FOR_S = 5.0  # a stopped launcher, before it goes on
_START_S = 240.0


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, or to its worker, mpirun or the launcher; when, and in what run.

    Attributes:
        kind: of `KINDS`.
        phase: of `PHASES`.
        after_s: how long after the rank gets there; exceptions are raised at once.
        plan: of `PLANS`, or "exchange".
        saves: whether the run writes checkpoints.
        restarts: `--max-restarts`.
    """

    kind: str
    phase: str
    victim: int
    after_s: float
    size: int
    plan: str
    saves: bool
    restarts: int


@dataclass
class Outcome:
    """What came of a fault.

    Attributes:
        error_s: from the fault to the last error of another rank that had one.
        end_s: from the fault to the end of a run that does not start again.
        restarted: it started again, and ended with the weights of an undisturbed run.
        late: the run was over before the fault could change it.
    """

    error_s: float | None = None
    end_s: float | None = None
    restarted: bool = False
    late: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def in_words(self) -> str:
        """One line."""
        error = "" if self.error_s is None else f"error after {self.error_s:.2f} s"
        end = "" if self.end_s is None else f"end after {self.end_s:.2f} s"
        what = "started again" if self.restarted else "too late" if self.late else ""
        return ", ".join(part for part in (error, end, what) if part) or "went on"


def table(tried: Sequence[tuple[Fault, Outcome]]) -> str:
    """What came of faults, by kind: rows of a page."""

    def seconds(found: list[float]) -> str:
        return f"{statistics.median(found):.2f}, {max(found):.2f}" if found else "-"

    lines = [
        "| what | runs | wrong | started again | error elsewhere, s | end of the run, s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        outcomes = [outcome for fault, outcome in tried if fault.kind == kind]
        errors = [o.error_s for o in outcomes if o.error_s is not None]
        ends = [o.end_s for o in outcomes if o.end_s is not None]
        wrong, again = sum(bool(o.problems) for o in outcomes), sum(o.restarted for o in outcomes)
        lines.append(f"| {kind} | {len(outcomes)} | {wrong} | {again} | {seconds(errors)} | {seconds(ends)} |")
    return "\n".join(lines)


def faults(count: int, seed: int) -> list[Fault]:
    """Faults of all kinds and phases in turn, the rest at random; most runs have two ranks."""
    generator, kinds, phases = random.Random(seed), list(KINDS), list(PHASES)
    found = []
    for number in range(count):
        phase = phases[(number % len(kinds) + number // len(kinds)) % len(phases)]
        light = phase in _EXCHANGE_PHASES and generator.random() < 0.6
        plan = "exchange" if light else generator.choice(PLANS)
        size = generator.choices((2, 4, 8), (50, 25, 25) if light else (92, 6, 2))[0]
        found.append(
            Fault(
                kinds[number % len(kinds)],
                phase,
                generator.randrange(size),
                round(generator.uniform(0.0, PHASES[phase]), 4),
                size,
                plan,
                phase == "save" or (not light and generator.random() < 0.5),
                int(generator.random() < 0.3),
            )
        )
    return found


class Faults:
    """Makes faults, and holds what runs without any end with."""

    def __init__(self) -> None:
        self._expected: dict[tuple[int, str], list[list[np.ndarray]]] = {}

    def expected(self, size: int, plan: str) -> list[list[np.ndarray]]:
        """The weights on every rank after a run without a fault."""
        if (size, plan) not in self._expected:
            with tempfile.TemporaryDirectory(prefix="whale-fault-") as name:
                folder = Path(name)
                process, log = _run(Launcher(folder), Fault("none", "none", 0, 0.0, size, plan, False, 0))
                process.wait(_START_S)
                assert process.returncode == 0, log.read_text()
                self._expected[size, plan] = [_weights(folder, 0, rank) for rank in range(size)]
        return self._expected[size, plan]

    def make(self, fault: Fault) -> Outcome:
        """One run with a fault; returns once all of it is over, or killed."""
        with tempfile.TemporaryDirectory(prefix="whale-fault-") as name:
            launcher = Launcher(Path(name))
            process, log = _run(launcher, fault)
            outcome = Outcome()
            try:
                self._judge(fault, launcher.folder, process, log, outcome)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            outcome.problems += [f"a process is left: {line}" for line in launcher.left_behind(within_s=20.0)]
            outcome.problems += [f"{path.name} is left" for path in (launcher.folder / "temporary").iterdir()]
            for up in launcher.folder.glob("up.*"):
                segments = json.loads(up.read_text())["segments"]
                if os.path.exists(segments):
                    outcome.problems.append(f"{segments} is left")
            if outcome.problems:
                outcome.problems.append(log.read_text()[-1500:])
            return outcome

    def _judge(self, fault: Fault, folder: Path, process: subprocess.Popen[bytes], log: Path, outcome: Outcome) -> None:
        fault_s = _fault_s(fault, folder, process)
        if fault_s is None:
            outcome.late = process.returncode == 0 and fault.phase == "shutdown"
            outcome.problems += [] if outcome.late else [f"no fault was made; code {process.poll()}"]
            return
        limit_s = SILENT_LIMIT_S if fault.kind.split()[1] in ("stopped", "closes") else LIMIT_S
        if fault.kind == "launcher stopped":
            time.sleep(max(0.0, fault_s + _STOPPED_FOR_S - time.monotonic()))
            process.send_signal(signal.SIGCONT)
        again = fault.restarts and not fault.kind.startswith("launcher")
        try:
            process.wait(
                fault_s
                + (_START_S if again or fault.kind == "launcher stopped" else limit_s + END_S)
                - time.monotonic()
            )
        except subprocess.TimeoutExpired:
            outcome.problems.append(f"the run has not ended {time.monotonic() - fault_s:.0f} s after the fault")
            return
        codes, said = KINDS[fault.kind]
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == 0:
            outcome.restarted = bool(list(folder.glob("up.1.*")))
            outcome.late = fault.phase == "shutdown" and not outcome.restarted
            if not (outcome.restarted or outcome.late or 0 in codes):
                outcome.problems.append("the run ends with code 0")
            self._compare(fault, folder, int(outcome.restarted), outcome)
        elif again or process.returncode not in codes:
            outcome.problems.append(f"the run ends with code {process.returncode}")
        elif said and not re.match(f"whale run: {said.format(victim=fault.victim)}", last):
            outcome.problems.append(f"the last line is {last!r}")
        if not again and process.returncode:
            outcome.end_s = time.monotonic() - fault_s
        self._judge_errors(fault, folder, fault_s, limit_s, outcome)
        if re.search(r"^Traceback", log.read_text(errors="replace"), re.MULTILINE):
            outcome.problems.append("the launcher had an exception")

    def _judge_errors(self, fault: Fault, folder: Path, fault_s: float, limit_s: float, outcome: Outcome) -> None:
        ours = fault.victim if fault.kind.split()[0] in ("rank", "worker") else None
        for rank in set(range(fault.size)) - {ours}:
            for path in folder.glob(f"other.*.{rank}"):
                outcome.problems.append(f"rank {rank}: {json.loads(path.read_text())['text']}")
            for path in folder.glob(f"error.*.{rank}"):
                error = json.loads(path.read_text())
                outcome.error_s = max(outcome.error_s or 0.0, error["time_s"] - fault_s)
                if ours is not None and not re.search(rf"\brank {ours}\b", error["text"]):
                    outcome.problems.append(f"rank {rank} is not told of rank {ours}: {error['text']}")
        if outcome.error_s is not None and outcome.error_s > limit_s:
            outcome.problems.append(f"{outcome.error_s:.1f} s until the last error")

    def _compare(self, fault: Fault, folder: Path, attempt: int, outcome: Outcome) -> None:
        expected = self.expected(fault.size, fault.plan)
        for rank in range(fault.size):
            for a, b in zip(expected[rank], _weights(folder, attempt, rank), strict=True):
                if not np.array_equal(a, b):
                    outcome.problems.append(f"weights of rank {rank} differ by {np.abs(a - b).max():g}")


def _run(launcher: Launcher, fault: Fault) -> tuple[subprocess.Popen[bytes], Path]:
    temporary, path = launcher.folder / "temporary", launcher.folder / "log"
    temporary.mkdir()
    launcher.environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(temporary)}
    script = str(ROOT / "tests" / "attack" / "victim.py")
    restarts = ("--max-restarts", str(fault.restarts)) if fault.restarts else ()
    facts = json.dumps(asdict(fault)), str(launcher.folder)
    with open(path, "wb") as log:
        command = launcher.command("-np", str(fault.size), *restarts, script, *facts)
        return (
            subprocess.Popen(
                command,
                env=launcher.environment,
                cwd=launcher.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            ),
            path,
        )


def _fault_s(fault: Fault, folder: Path, process: subprocess.Popen[bytes]) -> float | None:
    """When the fault was made, on this host's monotonic clock; None if the run ended, or did not get there."""
    path, deadline_s = folder / f"fault.0.{fault.victim}", time.monotonic() + _START_S
    while not path.exists():
        if (process.poll() is not None and not path.exists()) or time.monotonic() > deadline_s:
            return None
        time.sleep(0.02)
    return float(json.loads(path.read_text())["time_s"])


def _weights(folder: Path, attempt: int, rank: int) -> list[np.ndarray]:
    with np.load(folder / f"weights.{attempt}.{rank}.npz") as arrays:
        return [arrays[key] for key in arrays]
