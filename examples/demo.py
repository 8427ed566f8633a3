"""What `make demo` shows: the digits on one device without whale, then on two processes, and that both are the same.

In float64, where the losses of the first 20 steps may differ by 1e-9 of the largest. In float32 one activation that
rounding takes to the other side of zero would show, as other processors and numbers of threads do too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "digits.py")
SHOWN, RELATIVE_LIMIT, ASKED_ACCURACY, LEARNING_RATE = 20, 1e-9, 0.97, 5e-2
FLOAT64 = ["--precision", "float64"]


def run(console: Console, title: str, command: list[str], results: Path) -> dict[str, Any]:
    """Runs one training and returns what it wrote.

    Raises:
        SystemExit: it failed.
    """
    console.rule(title, align="left")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "COLUMNS": str(console.width),
    }
    done = subprocess.run([*command, "--results", str(results)], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{title}: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def compare(console: Console, plain: dict[str, Any], spread: dict[str, Any]) -> bool:
    """Prints both runs' losses side by side; true when they agree."""
    pairs = list(zip(plain["losses"][:SHOWN], spread["losses"][:SHOWN], strict=True))
    scale = max(max(abs(one) for one, _ in pairs), LEARNING_RATE * SHOWN)
    error = max(abs(one - two) for one, two in pairs) / scale
    table = Table("step", "one device", "two processes", "difference", title_justify="left")
    for index, (one, two) in enumerate(pairs):
        table.add_row(str(index + 1), f"{one:.12f}", f"{two:.12f}", f"{abs(one - two):.1e}")
    table.add_section()
    table.add_row("accuracy", f"{plain['accuracy']:.1%}", f"{spread['accuracy']:.1%}", "")
    console.print(table)
    agree = error <= RELATIVE_LIMIT
    good = min(plain["accuracy"], spread["accuracy"]) >= ASKED_ACCURACY
    verdict = "the same" if agree else "NOT the same"
    console.print(f"largest relative difference {error:.1e}, limit {RELATIVE_LIMIT:.1e}: {verdict}")
    console.print(f"accuracy at least {ASKED_ACCURACY:.0%}: {'yes' if good else 'NO'}")
    return agree and good


def main() -> int:
    """Exit code 1 when the runs differ or did not learn."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        plain = run(
            console,
            "one device, without whale",
            [sys.executable, SCRIPT, "--plain", *FLOAT64],
            Path(folder, "plain.json"),
        )
        spread = run(
            console,
            "two processes: whale run -np 2 examples/digits.py",
            [sys.executable, "-m", "whale", "run", "-np", "2", SCRIPT, *FLOAT64],
            Path(folder, "spread.json"),
        )
    console.rule("side by side", align="left")
    return int(not compare(console, plain, spread))


if __name__ == "__main__":
    sys.exit(main())
