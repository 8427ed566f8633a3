"""Runs programs of the table, one after the other: ``run.py OUT [--spread] NAME ...``; results go to OUT as JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

if importlib.util.find_spec("tf_keras") is not None:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.layers are Keras 2's

import tensorflow.compat.v1 as tf


def main(out: str, spread: bool, names: list[str]) -> None:
    """As scripts have it: version 1 first, Whale before the graph."""
    tf.disable_v2_behavior()
    rank = 0
    if spread:
        os.environ["TF1_TABLE_SPREAD"] = "1"
        import whale as wh

        wh.init()
        rank = wh.rank()
    from tests.tf1.more_programs import program  # noqa: F401, they add themselves to the table
    from tests.tf1.programs import PROGRAMS

    found: dict[str, dict[str, Any]] = {}
    for name in names or PROGRAMS:
        folder = os.path.join(os.path.dirname(out), f"{name}_spread" if spread else name)
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            try:
                found[name] = {"numbers": PROGRAMS[name](folder)}
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        with open(f"{out}.{rank}", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    names = [name for name in sys.argv[2:] if name != "--spread"]
    main(sys.argv[1], "--spread" in sys.argv, names)
