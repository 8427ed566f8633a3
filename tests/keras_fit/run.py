"""Runs cases in one process and saves what they give: plain, or as one rank of a run under one plan."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from tests.keras_fit.cases import CASES, Place

# Plan -> (configuration, which scopes `place` enters).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "replica": ({}, ""),
    "uneven": ({"batch.shares": [3, 1]}, ""),
    "split": ({}, "wide"),
    "stages": ({"pipeline.micro_batches": 2}, "stages"),
    "stages_whole": ({}, "stages"),  # each batch in one piece
    "zero": ({"memory.zero": 3, "memory.zero_min_bytes": 0}, ""),
    "auto": ({"mesh.auto_parallel": True}, ""),
}


class _Scopes(Place):
    def __init__(self, used: str) -> None:
        self._used = used

    def _scope(self, kind: str) -> AbstractContextManager[Any]:
        import whale as wh

        if self._used == "stages" and kind in ("first", "second"):
            return wh.stage()
        return wh.split() if self._used == kind else super().first()

    def first(self) -> Any:
        return self._scope("first")

    def second(self) -> Any:
        return self._scope("second")

    def wide(self) -> Any:
        return self._scope("wide")


def main() -> None:
    flavour, plan, folder, *names = sys.argv[1:]
    wh: Any = None
    rank = 0
    if plan != "plain":
        import whale

        wh = whale
        config, _ = PLANS[plan]
        if "batch.shares" in config:
            ranks = int(os.environ["WHALE_TEST_RANKS"])
            config = {**config, "batch.shares": [3, 1, 2, 2][:ranks]}
        wh.init({"batch.norm_statistics": "batch", "batch.random": "global", **config})
        rank = wh.rank()
    keras: Any = importlib.import_module("tf_keras" if flavour == "tf_keras" else "keras")
    for name in names:
        keras.backend.set_floatx("float64")
        keras.backend.clear_session()
        keras.utils.set_random_seed(11)
        shared = Path(folder, f"{plan}_{name}")
        shared.mkdir(exist_ok=True)
        os.environ["KERAS_FIT_FOLDER"] = str(shared)
        try:
            result = CASES[name](keras, Place() if wh is None else _Scopes(PLANS[plan][1]))
            values = {key: np.asarray(value) for key, value in result.items()}
            np.savez(shared / f"rank{rank}.npz", **values)
        except Exception as error:
            traceback.print_exc()
            (shared / f"rank{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
            if wh is not None:
                raise  # the others wait in vain
    print("cases done", flush=True)


if __name__ == "__main__":
    main()
