"""Kills a rank at random moments of saving: ``python -m tests.checkpoints.kill --count 100``.

With ``--store`` checkpoints are in a store of objects (`tests.checkpoints.store`), else in a folder. Each trial goes on
in what the one before has left. After each, plain TensorFlow must find a complete
checkpoint, none older than the last whose saving had ended, with the values that belong to its number of steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.checkpoints.store import find_library, list_keys, open_store
from tests.forkserver import warm_python
from tests.launcher.helpers import read_partly

SCRIPT = Path(__file__).with_name("saver.py")
_LIMIT_S = 300.0


def trial(place: str, said: Path, seed: int) -> str:
    """What is wrong after a run in which a rank is killed; "" if nothing is."""
    command = [warm_python(), "-m", "whale", "run", "-np", "2", str(SCRIPT), place, str(seed), str(said)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as late:
        return f"the run has not ended: {read_partly(late)}"
    if "was killed by SIGKILL" not in ended.stdout + ended.stderr:
        return f"no rank was killed: {ended.stdout}{ended.stderr}"
    path = tf.train.latest_checkpoint(place)
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
    parser.add_argument("--store", action="store_true", help="in a store of objects")
    options = parser.parse_args()
    good, left, start = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        folder.mkdir()
        place = str(folder)
        if options.store:
            open_store(folder)
            os.environ["OBJECT_LIBRARY"] = str(find_library())
            place = "objects://bucket/run"
        for number in range(options.count):
            wrong = trial(place, Path(name, "saved.txt"), options.seed + number)
            good += not wrong
            left += any(".writing-" in key for key in list_keys(folder))
            print(f"seed {options.seed + number}: {wrong or 'a complete checkpoint'}", flush=True)
    seconds = time.monotonic() - start
    print(f"{good} of {options.count} kills left a complete checkpoint ({left} of them in the middle of writing); "
          f"{seconds:.0f} s")  # fmt: skip
    return int(good < options.count)


if __name__ == "__main__":
    sys.exit(main())
