"""Compares a drawn program on some ranks with the same program on one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from tests.oracle.metric import FLOAT64_LIMIT
from tests.unknown_sizes.programs import draw_program
from whale.errors import PlanError

_ZERO = {"memory.zero_min_bytes": 0}
Scope = Callable[[], AbstractContextManager[Any]]
PLANS: dict[str, tuple[dict[str, Any], Scope]] = {
    "replica": ({}, nullcontext),
    "zero 1": ({**_ZERO, "memory.zero": 1}, nullcontext),
    "zero 2": ({**_ZERO, "memory.zero": 2}, nullcontext),
    "zero 3": ({**_ZERO, "memory.zero": 3}, nullcontext),
    "recomputed": ({**_ZERO, "memory.zero": 2, "memory.recompute": "auto"}, nullcontext),
    "split": ({}, wh.split),
    "columns": ({}, lambda: wh.split(dim=-1)),
    "auto": ({"mesh.auto_parallel": True}, nullcontext),
    "micro-batches": ({"pipeline.micro_batches": 2}, nullcontext),
}
# What needs more than is known, or than one micro-batch has, by the message: any other refusal is a fault.
_REFUSED = (
    "a result cannot be split along the dimension",
    "nothing under a split scope can be divided",
    "a value of all micro-batches is needed",
)


def compare(number: int) -> str:
    """Runs program ``number`` under the plan and on the ranks that follow from it; returns what came of it: ``equal``,
    ``refused``, or ``no numbers`` where one device finds none either.

    Raises:
      AssertionError: the ranks compute other numbers than one device.
    """
    drawn, draw = draw_program(number), random.Random(7 * number + 1)
    plan, ranks = draw.choice([*PLANS]), draw.choice([2, 2, 3])
    wanted = drawn.train(tf.function, nullcontext)
    if not all(np.isfinite(value).all() for value in wanted):
        return "no numbers"
    settings, scope = PLANS[plan]
    wh.init({"communication.in_process_ranks": ranks, "batch.norm_statistics": "batch", **settings})
    what = f"program {number}, {plan} on {ranks} ranks: {', '.join(drawn.blocks)}; {drawn.loss} of {drawn.sizes} rows"
    try:
        found = drawn.train(wh.function, scope)
    except PlanError as error:
        if str(error).startswith(_REFUSED):
            return "refused"
        raise AssertionError(what) from error
    finally:
        wh.shutdown()
    for a, b in zip(found, wanted, strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT64_LIMIT * scale, err_msg=what)
    return "equal"
