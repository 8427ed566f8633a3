"""``memory.attention_scores_bytes``: attention in blocks of queries equals one device, with few scores held."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.context import Model
from tests.memory import peaks_above

LIMIT = 1e-10
BLOCKS = {"memory.attention_scores_bytes": 1}


def train(model: Any) -> list[np.ndarray]:
    losses = [np.asarray(model.step(*model.batch(i))) for i in range(2)]
    return losses + [v.numpy() for v in model.variables]


def worst(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(found, expected, strict=True))


def blocks_of(step: Any) -> set[int]:
    """The numbers of queries for which shares are computed at a time."""
    (found,) = step._steps.values()
    nodes = [n for p in found.compiled.ranks for graph in (p, *p.functions.values()) for n in graph.nodes]
    shares = [n.outputs[0].shape for n in nodes if n.op in ("Softmax", "Exp")]
    return {shape[-2] for shape in shares if shape and shape[-1] != 1}


@pytest.mark.parametrize(
    ("count", "config", "scope", "shape", "form", "queries"),
    [
        (1, {}, contextlib.nullcontext, (2, 130, 2, 4), "matmul", {65}),
        (2, {}, wh.replica, (3, 193, 2, 4), "einsum", {64, 65}),
        (2, {"pipeline.micro_batches": 2}, wh.replica, (4, 128, 1, 4), "where", {64}),
        (2, {"memory.recompute": "auto"}, wh.replica, (2, 128, 2, 4), "dense", {64}),
        (2, {}, wh.split, (2, 128, 2, 4), "matmul", {64}),
        (2, {}, partial(wh.split, context=1), (1, 256, 1, 4), "where", {64}),
        (4, {"mesh": wh.Mesh(data=2, context=2)}, partial(wh.split, context=1), (2, 258, 1, 4), "einsum", {64, 65}),
    ],
    ids=str,
)
def test_blocks_equal_one_device(
    ranks: Callable[..., None], count: int, config: dict[str, Any], scope: Any, shape: tuple[int, int, int, int],
    form: str, queries: set[int],
) -> None:  # fmt: skip
    expected = train(Model(tf.function, contextlib.nullcontext, shape, form=form))
    ranks(count, **BLOCKS, **config)
    model = Model(wh.function, scope, shape, form=form)
    assert worst(train(model), expected) <= LIMIT
    assert blocks_of(model.step) == queries


def peak_and_predicted_bytes(scores_bytes: int, ranks: Callable[..., None]) -> tuple[float, int]:
    """Of a step at a sequence of 2,048, without what is live before it."""
    made: list[Any] = []

    def step() -> Callable[[], Any]:
        made.append(Model(wh.function, contextlib.nullcontext, (1, 2048, 1, 32), form="where", dtype="float32"))
        return lambda: made[0].step(*made[0].batch(0))

    ranks(1, **{"memory.attention_scores_bytes": scores_bytes})
    # In which order TensorFlow runs what may run at the same time differs from step to step.
    peak = statistics.median(peaks_above(step))
    predicted = sum(held[0] for held in wh.plan(made[0].step, *made[0].batch(0)).memory.values())
    wh.shutdown()
    return peak, predicted


def test_the_peak_of_a_long_sequence(ranks: Callable[..., None]) -> None:
    """What a step allocates, and what the plan says that it would: masks of all blocks are not kept either."""
    blocks, predicted_of_blocks = peak_and_predicted_bytes(1, ranks)
    whole, predicted = peak_and_predicted_bytes(0, ranks)  # TensorFlow keeps the mask of the whole
    scores_bytes = 4 * 64 * 2048  # of a block; how many are alive together depends on which thread is first
    assert predicted_of_blocks == pytest.approx(blocks, abs=4 * scores_bytes)
    assert predicted == pytest.approx(whole, rel=0.2)
    assert blocks <= 0.3 * whole
