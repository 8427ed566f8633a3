"""Starts plain runs and runs under plans, and compares what they saved."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forkserver import plain_python, warm_python
from tests.keras_fit.cases import LIMITS
from tests.saved_values import difference

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-10
# What a pipeline of micro-batches cannot do, since it needs all rows of a batch before the last ones have come:
# statistics over the batch in the first stage, and an update that reads what another one has changed. Plan -> cases.
REFUSED = {"stages": ("batch_statistics", "two_optimizers")}
REFUSAL = "value of all micro-batches is needed before the last one is finished"


@dataclass(frozen=True)
class Row:
    """A case under a plan beside plain Keras.

    Attributes:
      difference: largest over all that was compared and all ranks, relative to the largest element of each value.
      problem: what kept it from being compared; "" if nothing.
      refused: whether it is one of those that are to be refused, and was.
    """

    case: str
    plan: str
    ranks: int
    difference: float = float("nan")
    where: str = ""
    problem: str = ""
    refused: bool = False

    @property
    def ok(self) -> bool:
        """Whether it equals plain Keras, or is refused as it has to be."""
        if self.case in REFUSED.get(self.plan, ()):
            return self.refused
        return not self.problem and self.difference <= LIMITS.get(self.case, LIMIT)


def plain(flavour: str, cases: Sequence[str], folder: Path, timeout_s: float = 900) -> None:
    """Saves what plain Keras gives, in a process that never imports whale."""
    command = [plain_python(), "-m", "tests.keras_fit.run", flavour, "plain", str(folder), *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0 or "cases done" not in done.stdout:
        raise RuntimeError(f"plain Keras failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def compared(
    flavour: str, plan: str, ranks: int, cases: Sequence[str], folder: Path, timeout_s: float = 900
) -> list[Row]:
    """The cases under a plan beside what ``plain`` saved."""
    rows: list[Row] = []
    rest = list(cases)
    while rest:
        said = _run(flavour, plan, ranks, rest, folder, timeout_s)
        for i, name in enumerate(rest):
            row = _row(name, plan, ranks, folder, said)
            rows.append(row)
            if row.problem:  # this one ended the run
                rest = rest[i + 1 :]
                break
        else:
            rest = []
    return rows


def _run(flavour: str, plan: str, ranks: int, cases: Sequence[str], folder: Path, timeout_s: float) -> str:
    script = [str(ROOT / "tests/keras_fit/run.py"), flavour, plan, str(folder), *cases]
    command = [warm_python(), "-m", "whale", "run", "-np", str(ranks), *script]
    known = environment() | {"WHALE_TEST_RANKS": str(ranks)}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=timeout_s)
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    """Of a process that is started: this one's, quiet, with the project and what else is on the path."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path}


def _row(name: str, plan: str, ranks: int, folder: Path, said: str) -> Row:
    reference = folder / f"plain_{name}" / "rank0.npz"
    if not reference.exists():
        return Row(name, plan, ranks, problem=f"plain: {(folder / f'plain_{name}' / 'rank0.json').read_text()}")
    here = folder / f"{plan}_{name}"
    for rank in range(ranks):
        if not (here / f"rank{rank}.npz").exists():
            failed = here / f"rank{rank}.json"
            problem = json.loads(failed.read_text()) if failed.exists() else said[-1500:]
            return Row(name, plan, ranks, problem=problem, refused=REFUSAL in said)
    gap = difference(reference, [here / f"rank{rank}.npz" for rank in range(ranks)])
    return Row(name, plan, ranks, gap.largest, gap.where, gap.problem)
