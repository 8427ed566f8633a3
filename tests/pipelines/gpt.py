"""A GPT over stage=2,data=2,tensor=2 on eight processes, in every schedule, beside one device.

python -m tests.pipelines.gpt [SCHEDULE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.forkserver import warm_python
from tests.pipelines.gpt_on_ranks import MESH, SCHEDULES, Sizes, formulas, trained

LIMIT = 1e-10
MOST_BYTES = 1.1  # of what the formulas say
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Returns the exit code: 1 when a run is not as one device, copies differ, or more moves than the formulas say."""
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines.gpt", description=__doc__.partition("\n")[0])
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES), help=f"of {', '.join(SCHEDULES)}")
    wrong = 0
    for schedule in parser.parse_args().schedules:
        text, is_right = compared(schedule)
        print(f"{schedule:12} {text}", flush=True)
        wrong += not is_right
    return int(bool(wrong))


def compared(schedule: str) -> tuple[str, bool]:
    """A line for one schedule, and whether all is as it should be."""
    sizes, (_, stages) = Sizes(), SCHEDULES[schedule]
    nothing = contextlib.nullcontext
    wanted, _ = trained(sizes, stages, nothing, nothing, tf.function)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [dict(np.load(path)) for path in ran(schedule, folder)]
    worst = max(float(np.max(np.abs(one[name] - value))) for one in ranks for name, value in wanted.items())
    same = all(np.array_equal(one[name], ranks[0][name]) for one in ranks for name in wanted)
    parts = []
    few = True
    for axis, bytes_ in formulas(sizes, stages).items():
        ratio = sum(int(one.get(f"moved {axis}", 0)) for one in ranks) / bytes_
        few = few and 0 < ratio <= MOST_BYTES
        parts.append(f"{axis} {ratio:.3f}")
    text = f"{worst:.1e} from one device, ranks {'bitwise equal' if same else 'DIFFER'}; bytes / formula: "
    return text + ", ".join(parts), worst <= LIMIT and same and few


def ran(schedule: str, folder: str) -> list[Path]:
    """Runs the ranks; where each has left its losses and weights.

    Raises:
      RuntimeError: the run failed.
    """
    count = int(np.prod(list(MESH.values())))
    script = [str(ROOT / "tests/pipelines/gpt_on_ranks.py"), schedule, folder]
    command = [warm_python(), "-m", "whale", "run", "-np", str(count), *script]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ) | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{schedule} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [Path(folder, f"rank{rank}.npz") for rank in range(count)]


if __name__ == "__main__":
    sys.exit(main())
