"""Runs one program, alone or as a rank: run.py SCRIPT FOLDER [whale]. The two lines that a user adds are `_ADDED`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

# In float64, and with what equals one device where batches are normalised or noise is drawn.
# On the line of the program's first one: AutoGraph finds the sources of lambdas by their line's number.
_ADDED = 'import whale as wh; wh.init({"batch.norm_statistics": "batch", "batch.random": "global"}); '
_FIXED = ("hugging_face", "probability", "sonnet", "two_towers")  # libraries whose models have a type of their own


def main() -> None:
    script, folder, *under = sys.argv[1:]
    name = Path(script).stem
    legacy = bool(os.environ.get("TF_USE_LEGACY_KERAS"))
    keras: Any = importlib.import_module("tf_keras" if legacy else "keras")
    if not name.startswith(_FIXED):
        keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(7)
    os.environ["PROGRAM_FOLDER"] = folder
    source, rank = Path(script).read_text(), 0
    added = ""
    if under:
        added = _ADDED
        if name.startswith("sonnet"):  # a loop of its own says which function is its step
            source = source.replace("@tf.function", "@wh.function")
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(added + source, script, "exec"), variables)
    if under:
        rank = variables["wh"].rank()
    values: dict[str, np.ndarray] = {}
    for key, value in variables["result"].items():
        parts = value if key == "weights" else [value]
        values |= {f"{key} {i}" if len(parts) > 1 else key: np.asarray(part) for i, part in enumerate(parts)}
    np.savez(Path(folder, f"rank{rank}.npz"), **values)


if __name__ == "__main__":
    main()
