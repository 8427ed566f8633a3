"""Runs the table's programs alone and on two ranks, and compares what they return."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.forkserver import plain_python, warm_python
from whale.errors import REPORT_FAULT

ROOT = Path(__file__).parents[2]
# Sums of single precision in another order; what is of double precision is as close as its place demands.
RELATIVE, ABSOLUTE = 2e-6, 1e-6
CLOSE = 1e-10
OF_FIRST_RANK = frozenset({"summaries"})  # the others' are empty


@dataclass(frozen=True)
class Row:
    """How a program did: ``equal``, ``refused`` (why, and what to add), or ``different``."""

    name: str
    kind: str
    text: str = ""


def compared(names: Sequence[str], folder: Path, python: str | None = None) -> list[Row]:
    """Runs these programs (none: all) alone and on two ranks, by another Python if one is given."""
    (folder / "alone").mkdir()
    alone = _run(
        [python or plain_python(), "-m", "tests.tf1.run", str(folder / "alone" / "out"), *names], folder / "alone", 1
    )[0][0]
    left, found, runs = list(alone), [dict[str, Any](), dict[str, Any]()], 0
    while left:  # what ends the run of all ranks is one program's; the next run begins behind it
        runs += 1
        (folder / f"spread_{runs}").mkdir()
        out = folder / f"spread_{runs}" / "out"
        command = [
            python or warm_python(),
            "-m",
            "whale",
            "run",
            "-np",
            "2",
            "tests/tf1/run.py",
            str(out),
            "--spread",
            *left,
        ]
        ranks, printed = _run(command, out.parent, 2)
        ended = next((i for i, name in enumerate(left) if _ended(name, ranks)), len(left))
        for name in left[: ended + 1]:
            for mine, said in zip(found, ranks):
                mine[name] = said.get(name, {"error": f"the run ended: {printed}"})
        left = left[ended + 1 :]
    return [_row(name, alone[name], [mine[name] for mine in found]) for name in alone]


def _ended(name: str, ranks: Sequence[dict[str, Any]]) -> bool:
    """Whether the ranks went apart in this program."""
    return any(name not in said or "CommError" in said[name].get("error", "") for said in ranks) or (
        len({"error" in said[name] for said in ranks}) > 1
    )


def _run(command: list[str], folder: Path, ranks: int) -> tuple[list[dict[str, Any]], str]:
    """What each rank found, and how the run ended in its own words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    paths = [folder / f"out.{rank}" for rank in range(ranks)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    return found, f"exit {done.returncode}; " + "; ".join(done.stderr.splitlines()[-12:])


def _row(name: str, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> Row:
    errors = [said["error"] for said in (alone, *ranks) if "error" in said]
    if "error" in alone:
        return Row(name, "different", f"alone: {errors[0]}")
    if errors:
        refused = len(errors) == len(ranks) and all(
            "next: " in text and "CommError" not in text and REPORT_FAULT not in text for text in errors
        )
        lines = [line.strip() for line in errors[0].splitlines()]
        kept = [line for line in lines if line.startswith(("op: ", "next: "))] if refused else []
        return Row(name, "refused" if refused else "different", "; ".join([lines[0].partition(": ")[2], *kept]))
    wanted = alone["numbers"]
    others = ranks[:1] if name in OF_FIRST_RANK else ranks
    for said in others:
        value = said["numbers"]
        if len(value) != len(wanted) or not np.allclose(value, wanted, RELATIVE, ABSOLUTE):
            return Row(name, "different", f"{value[:4]} for {wanted[:4]}")
    exact = all(np.allclose(said["numbers"], wanted, CLOSE, CLOSE) for said in others)
    return Row(name, "equal", "1e-10" if exact else "single precision")
