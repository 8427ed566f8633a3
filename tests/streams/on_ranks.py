"""Runs drawn programs: ``on_ranks.py orders|draws plain|ranks|N FOLDER NUMBER ...``; saves what each gives.

``ranks``: as a rank of `whale run`; a number: on so many ranks in this process.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    kind, place, folder, *numbers = sys.argv[1:]
    wh: Any = None
    rank = "plain"
    if place != "plain":
        wh = importlib.import_module("whale")
        within = {} if place == "ranks" else {"communication.in_process_ranks": int(place)}
        wh.init({"batch.random": "global", **within})
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
            if place != "plain":
                raise
            continue  # Keras takes no such program: a dataset that is empty, say
        np.savez(Path(folder, f"{rank}_{number}.npz"), **found)
    print("programs done", flush=True)


if __name__ == "__main__":
    main()
