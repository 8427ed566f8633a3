"""Cases on ranks beside the same on one device, each in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.forkserver import plain_python, warm_python

ROOT = Path(__file__).resolve().parents[2]
Found = dict[tuple[str, int | None], dict[str, list[float]] | str]


def results(who: str, ranks: int, names: Sequence[str]) -> Found:
    """(case, rank) -> what it gave, or its error."""
    script = ["tests.epl.on_ranks", who, str(ranks), *names]
    command = ["-m", *script] if who == "alone" else ["-m", "whale", "run", "-np", str(ranks), "-v", "-m", *script]
    python = plain_python() if who == "alone" else warm_python()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with tempfile.TemporaryDirectory() as folder:
        environment["EPL_TEST_FOLDER"] = folder  # which all ranks have in common
        done = subprocess.run(
            [python, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    said = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", done.stdout)]
    found: Found = {(one["name"], one["rank"]): one["found"] for one in said}
    assert len(found) == len(names) * (1 if who == "alone" else ranks), done.stdout[-3000:] + done.stderr[-6000:]
    return found


def difference(found: object, wanted: object) -> tuple[float, str]:
    """The largest difference of any value, by the largest of its kind; and of which."""
    if isinstance(found, str) or isinstance(wanted, str):
        return float("inf"), str(found if isinstance(found, str) else wanted)
    assert isinstance(found, dict) and isinstance(wanted, dict)
    if found.keys() != wanted.keys():
        return float("inf"), f"{sorted(found)} for {sorted(wanted)}"
    worst, where = 0.0, ""
    for name, values in wanted.items():
        mine, theirs = np.asarray(found[name]), np.asarray(values)
        if mine.shape != theirs.shape:
            return float("inf"), f"{name}: {mine.shape} for {theirs.shape}"
        error = float(np.max(np.abs(mine - theirs))) / max(1.0, float(np.max(np.abs(theirs))))
        worst, where = max((worst, where), (error, name))
    return worst, where
