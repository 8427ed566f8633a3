"""Checkpoints saved under one plan and continued under another, against a run of one device that never stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from tests.checkpoints.model import Model, batch

BEFORE, AFTER = 3, 5  # steps

# Plan -> configuration; None is TensorFlow alone. "split" in the name: the layers are built in wh.split scopes.
PLANS: dict[str, Mapping[str, Any] | None] = {
    "plain TensorFlow": None,
    "1 rank": {"communication.in_process_ranks": 1},
    "DP 2": {"communication.in_process_ranks": 2},
    "DP 3 uneven": {"communication.in_process_ranks": 3, "batch.shares": [6, 4, 2]},
    "split 2": {"communication.in_process_ranks": 2},
    "2x2 split": {"communication.in_process_ranks": 4, "mesh": wh.Mesh(tensor=2)},
    "ZeRO-1 of 2": {"communication.in_process_ranks": 2, "memory.zero": 1, "memory.zero_min_bytes": 0},
    "ZeRO-2 of 3": {"communication.in_process_ranks": 3, "memory.zero": 2, "memory.zero_min_bytes": 0},
    "ZeRO-3 of 2": {"communication.in_process_ranks": 2, "memory.zero": 3, "memory.zero_min_bytes": 0},
}


@contextlib.contextmanager
def run(plan: str) -> Iterator[Model]:
    """A model under a plan, in this process."""
    config = PLANS[plan]
    if config is None:
        yield Model(tf.function)
        return
    wh.init(config)
    try:
        yield Model(wh.function, wh.split) if "split" in plan else Model(wh.function)
    finally:
        wh.shutdown()


def reference() -> list[np.ndarray]:
    """The values of a run of one device that never stopped."""
    with run("plain TensorFlow") as model:
        train(model, 0, BEFORE + AFTER)
        return model.values()


def train(model: Model, first: int, count: int) -> None:
    for number in range(first, first + count):
        model.step(*batch(number))


def save(plan: str, folder: Path) -> str:
    """The path of a checkpoint after ``BEFORE`` steps."""
    with run(plan) as model:
        train(model, 0, BEFORE)
        if PLANS[plan] is None:
            return str(tf.train.CheckpointManager(model.checkpoint, str(folder), 1).save())
        return str(wh.CheckpointManager(model.checkpoint, folder, 1).save())


def continued(plan: str, path: str) -> list[list[np.ndarray]]:
    """The values ``AFTER`` steps after the checkpoint, restored into a new model, and into one that has made steps."""
    found = []
    with run(plan) as model:
        manager = None if PLANS[plan] is None else wh.CheckpointManager(model.checkpoint, Path(path).parent, 1)
        for _ in range(2):
            status = model.checkpoint.restore(path) if manager is None else manager.restore(path)
            status.assert_existing_objects_matched()
            assert int(model.done) == BEFORE
            train(model, BEFORE, AFTER)
            found.append(model.values())
    return found


def error(values: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    worst = 0.0
    for value, whole in zip(values, wanted, strict=True):
        assert value.shape == whole.shape and value.dtype == whole.dtype
        if value.size:
            worst = max(worst, float(np.max(np.abs(value - whole)) / max(1e-3, np.max(np.abs(whole)))))
    return worst
