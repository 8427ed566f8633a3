"""Runs drawn programs: ``on_ranks.py orders|draws plain|ranks|N FOLDER NUMBER ...``; saves what each gives.

``ranks``: as a rank of `whale run`; a number: on so many ranks in this process.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    kind, place, folder, *numbers = sys.argv[1:]
    wh, rank = None, "plain"
    if place != "plain":
        import whale as wh

        within = {} if place == "ranks" else {"communication.transport": "in-process", "cluster.ranks": int(place)}
        wh.init({"random": "global", **within})
        rank = f"rank{wh.rank()}"
    import keras

    programs = importlib.import_module(f"tests.streams.{kind}")
    run = programs.run_of(wh, keras)
    for number in map(int, numbers):
        program = programs.drawn(number)
        try:
            found = run(program)
        except Exception:
            print(f"{kind} {number} failed: {program}", flush=True)
            raise
        np.savez(Path(folder, f"{rank}_{number}.npz"), **found)
    print("programs done", flush=True)


if __name__ == "__main__":
    main()
