"""Kills a rank at random moments of saving: ``python -m tests.checkpoints.kill --count 100``.

Each trial goes on in the folder that the one before has left. After each, plain TensorFlow must find a complete
checkpoint, none older than the last whose saving had ended, with the values that belong to its number of steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.forkserver import warm_python

SCRIPT = Path(__file__).with_name("saver.py")


def trial(folder: Path, seed: int) -> str:
    """What is wrong after a run in which a rank is killed; "" if nothing is."""
    ended = subprocess.run(
        [warm_python(), "-m", "whale", "run", "-np", "2", str(SCRIPT), str(folder), str(seed)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if "was killed by SIGKILL" not in ended.stdout + ended.stderr:
        return f"no rank was killed: {ended.stdout}{ended.stderr}"
    path = tf.train.latest_checkpoint(str(folder))
    said = folder / "saved.txt"
    last = int(said.read_text().split()[-1]) if said.exists() else 0
    if path is None:
        return "no checkpoint" if last else ""
    reader = tf.train.load_checkpoint(path)
    done = int(reader.get_tensor("done/.ATTRIBUTES/VARIABLE_VALUE"))
    if done < last:
        return f"the checkpoint is of step {done}, and {last} had been saved"
    for name, wanted in (("momentum", done), ("weight", -done * (done + 1) / 2)):
        value = reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
        if not np.all(value == wanted):
            return f"{name} is {value.min()} to {value.max()} after {done} steps, not {wanted}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    good, left, start = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.count):
            wrong = trial(folder, options.seed + number)
            good += not wrong
            left += bool(list(folder.glob(".writing-*")))
            if wrong:
                print(f"seed {options.seed + number}: {wrong}", flush=True)
    seconds = time.monotonic() - start
    print(f"{good} of {options.count} kills left a complete checkpoint ({left} of them in the middle of writing); "
          f"{seconds:.0f} s")  # fmt: skip
    return int(good < options.count)


if __name__ == "__main__":
    sys.exit(main())
