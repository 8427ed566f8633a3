"""One run against one device."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from tests.pipelines.matrix import Run
from tests.pipelines.models import RATE, STEPS, in_turn, trained_tf1, trained_tf2
from whale.runtime.start import check_replicas

LIMIT = 1e-10


@cache
def on_one_device(model: str, optimizer: str, api: str) -> dict[str, np.ndarray]:
    nothing = contextlib.nullcontext
    if api == "tf1":
        return trained_tf1(model, optimizer, nothing, nothing, lambda graph: tf.compat.v1.Session(graph=graph))[0]
    return trained_tf2(model, optimizer, nothing, nothing, tf.function)[0]


def difference(run: Run, **more: Any) -> tuple[float, str]:
    """max|difference| / max(max|value|, learning rate x steps) over all results and variables, and which has it.

    Args:
      more: settings beside those of the run.

    Raises:
      AssertionError: the plan is none of stages, or nothing travels between them.
    """
    wanted = on_one_device(run.layout.model, run.optimizer, run.api)
    config = {
        "communication.in_process_ranks": run.layout.ranks,
        "pipeline.micro_batches": run.micro_batches,
        "pipeline.schedule": run.schedule,
        "memory.recompute": "auto" if run.recompute else "",
        "memory.zero": run.zero,
        "memory.zero_min_bytes": 0,
        "batch.norm_statistics": "batch",
        "batch.random": "global",
        "mesh": wh.Mesh.parse(run.layout.mesh),
        **more,
    }
    wh.init(wh.Config(config))
    try:
        stage = in_turn(wh.stage, run.layout.devices)
        split = wh.split if run.layout.split else contextlib.nullcontext
        if run.api == "tf1":
            found, _ = trained_tf1(run.layout.model, run.optimizer, stage, split, lambda graph: wh.Session(graph=graph))
        else:
            found, step = trained_tf2(run.layout.model, run.optimizer, stage, split, wh.function)
            check_replicas()
            plan = next(iter(step._steps.values())).compiled.plan
            assert plan.edges and plan.logical_bytes > 0, "nothing travels between stages"
            equal = 8 if run.micro_batches == 7 and (run.layout.devices or run.layout.split) else run.micro_batches
            assert plan.micro_batches in (run.micro_batches, equal), plan.micro_batches  # 16 rows in 7, or in 8 of 2
            divided = any(len(group.ranks) > 1 for group in plan.stage_groups)
            assert not run.zero or not divided or plan.variables, "no variable lies split"
    finally:
        wh.shutdown()
    assert found.keys() == wanted.keys()
    worst, where = 0.0, ""
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        if value.size:
            error = float(np.max(np.abs(found[name] - value)) / max(np.max(np.abs(value)), RATE * STEPS))
            worst, where = max((worst, where), (error, name))
    return worst, where
