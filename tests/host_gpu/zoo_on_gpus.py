"""Script for `whale run`: several cases of the zoo on GPUs, one after the other in the same processes.

zoo_on_gpus.py FOLDER CASE/OPTIMIZER/SHARES/SCOPE ...

As of tests/distributed/case_on_ranks.py; each rank writes FOLDER/<case>/<rank>.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import tensorflow as tf

import whale as wh
from tests.oracle.execute import execute, save
from tests.oracle.stages import in_turns
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.runtime.start import check_replicas


def run(folder: Path, what: str) -> None:
    """Runs one case on this rank."""
    name, optimizer, shares, scope = what.split("/")
    scope, _, count = scope.partition(":")
    rows = [] if "even" in shares else [int(part) for part in shares.split(",")]
    settings = {
        "batch.shares": rows,
        "batch.norm_statistics": "batch",
        "batch.random": "global",
        "memory.zero": int(count or 1) if scope == "zero" else 0,
        "memory.zero_min_bytes": 0,
        "pipeline.micro_batches": 2 if scope == "stage" else 1,
    }
    wh.init(settings)
    keras.utils.clear_session()
    tf.compat.v1.reset_default_graph()
    case = case_named(name)
    inside = in_turns(int(count)) if scope == "stage" else wh.split if scope == "split" else wh.replica
    setting = Setting("float64", optimizer, wh.function, lambda graph: wh.Session(graph=graph), inside)
    program = build(case, setting)
    values = execute(case, program)
    check_replicas()
    (folder / what.replace("/", "_")).mkdir(exist_ok=True)
    save(folder / what.replace("/", "_") / f"{wh.rank()}.npz", values)


def main() -> None:
    folder = Path(sys.argv[1])
    for what in sys.argv[2:]:
        run(folder, what)
        if wh.rank() == 0:
            print(f"done: {what}", flush=True)
    wh.shutdown()


main()
