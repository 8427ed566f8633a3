"""Starts programs alone and on ranks, and compares what they end with."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.forkserver import plain_python, warm_python
from tests.keras_fit.table import environment
from tests.saved_values import difference

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/guides/scripts"
# Program -> package that it is written for, other than Keras 3.
NEEDS = {
    "hugging_face_bert": "transformers",
    "hugging_face_gpt2": "transformers",
    "keras_hub_bert": "keras_hub",
    "keras_hub_llama": "keras_hub",
    "two_towers": "tensorflow_recommenders",
    "probability_vae": "tensorflow_probability",
    "sonnet_mlp": "sonnet",
}
_LEGACY = {"transformers", "tensorflow_recommenders", "tensorflow_probability"}  # written for Keras 2
_ROUNDED = _LEGACY | {"sonnet"}  # in float32
LIMIT, ROUNDED_LIMIT = 1e-10, 1e-4


@dataclass(frozen=True)
class Row:
    """A program on some ranks beside itself alone.

    Attributes:
      difference: largest over all values and ranks, relative to the largest element of each.
      problem: what kept it from being compared; "" if nothing.
      left_out: what it is written for is not installed here.
    """

    name: str
    ranks: int
    difference: float = float("nan")
    where: str = ""
    problem: str = ""
    left_out: bool = False

    @property
    def limit(self) -> float:
        return ROUNDED_LIMIT if NEEDS.get(self.name) in _ROUNDED else LIMIT

    @property
    def ok(self) -> bool:
        return not self.problem and self.difference <= self.limit


def names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def about(name: str) -> str:
    """The program's own first line."""
    return (ast.get_docstring(ast.parse((SCRIPTS / f"{name}.py").read_text())) or "").splitlines()[0]


def missing(name: str) -> str:
    """The package that a program needs and that is not here; "" if none."""
    package = NEEDS.get(name, "")
    return package if package and importlib.util.find_spec(package) is None else ""


def alone(name: str, folder: Path) -> str:
    """Runs a program in a process that never imports whale; what it said if it failed, else ""."""
    (folder / "alone").mkdir(exist_ok=True)
    done = _run([str(ROOT / "tests/guides/run.py"), str(SCRIPTS / f"{name}.py"), str(folder / "alone")], name)
    return f"alone: {done.stderr[-3000:]}" if done.returncode else ""


def compared(name: str, ranks: int, folder: Path) -> Row:
    """Runs a program on ranks, and compares it with what ``alone`` left in the folder."""
    here = folder / f"on_{ranks}"
    here.mkdir(exist_ok=True)
    script = [str(ROOT / "tests/guides/run.py"), str(SCRIPTS / f"{name}.py"), str(here), "whale"]
    done = _run(["-m", "whale", "run", "-np", str(ranks), *script], name)
    if done.returncode:
        return Row(name, ranks, problem=(done.stdout + done.stderr)[-1500:])
    gap = difference(folder / "alone/rank0.npz", [here / f"rank{rank}.npz" for rank in range(ranks)])
    return Row(name, ranks, gap.largest, gap.where, gap.problem)


def _run(command: list[str], name: str) -> subprocess.CompletedProcess[str]:
    known = environment()
    if NEEDS.get(name) in _LEGACY:
        known["TF_USE_LEGACY_KERAS"] = "1"
    python = warm_python() if "whale" in command else plain_python()
    return subprocess.run([python, *command], env=known, capture_output=True, text=True, timeout=600)
