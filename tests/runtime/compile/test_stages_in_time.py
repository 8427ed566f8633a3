"""Micro-batches over stages: every schedule computes what one device computes, in its order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.runtime.compile.test_stages import Chain, Tied, Towers, assert_equals_one_device, batch, trained, weight
from whale.errors import PlanError
from whale.ir.pipeline_schedule import make_schedule
from whale.ir.plan_text import format_plan

Start = Callable[..., None]


def setting(name: str, micro_batches: int) -> dict[str, Any]:
    return {"pipeline.micro_batches": micro_batches, "pipeline.schedule": name}


@pytest.mark.parametrize(
    ("name", "stages", "count", "micro_batches"),
    one_of(
        2,
        [
            pytest.param("1f1b", 2, 2, 4, marks=pytest.mark.core),
            ("1f1b", 4, 4, 7),
            ("gpipe", 3, 3, 2),
            ("zb-h1", 2, 2, 4),
            ("zb-h1", 4, 4, 8),
            ("1f1b", 2, 4, 4),
            ("1f1b", 4, 2, 4),
        ],
        several=True,
    ),
)
def test_schedules_equal_one_device(ranks: Start, name: str, stages: int, count: int, micro_batches: int) -> None:
    plan = assert_equals_one_device(ranks, lambda stage: Chain(stage, stages), count, **setting(name, micro_batches))
    assert plan.micro_batches == micro_batches
    assert f"Schedule {name}, {micro_batches} micro-batches" in format_plan(plan)


def test_a_shared_variable_is_summed_over_stages_and_micro_batches(ranks: Start) -> None:
    assert_equals_one_device(ranks, Tied, 3, **setting("1f1b", 4))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_each_rank_calls_its_phases_in_the_order_of_the_schedule(ranks: Start, name: str) -> None:
    ranks(3, **setting(name, 4))
    _, step = trained(Chain(wh.stage, 3), wh.function)
    compiled = step._step(batch(0), {}).compiled
    wanted = make_schedule(name, 3, 1, 4)
    for rank, program in enumerate(compiled.ranks):
        calls = [n for n in program.nodes if n.op == "WhaleCall"]
        order = [n.name.rpartition("/")[2].replace("0_", "") for n in calls]
        # The first stage has no gradients of inputs, and no part of B beside W.
        expected = [str(p) for p in wanted[rank] if str(p)[0] in {name[0] for name in order}]
        assert order == expected
        for before, after in pairwise(calls):
            assert before.name in after.controls


def test_no_more_is_under_way_than_the_reader_has_room_for(ranks: Start) -> None:
    """Receives wait for calls that have taken what came before, calls for sends that nobody has taken yet."""
    ranks(2, **setting("1f1b", 8))
    model = Chain(wh.stage, 2)
    first, second = wh.function(model.losses)._step(batch(0), {}).compiled.ranks  # forward passes only
    calls = [n for n in first.nodes if n.op == "WhaleCall" and "/F0_" in n.name]
    sends = [
        n.name for n in first.nodes if n.op == "WhaleSend" and n.attrs["key"].rpartition("/")[0].endswith("@0to1/0")
    ]
    receives = [
        n for n in second.nodes if n.op == "WhaleRecv" and n.attrs["key"].rpartition("/")[0].endswith("@0to1/0")
    ]
    assert len(calls) == 8 and len(sends) == len(receives) == 2 * 8  # two tensors: a skip connection's as well
    free = [n for n in receives if not n.controls]
    running = [n for n in calls if not set(n.controls) & set(sends)]
    assert 0 < len(free) == 2 * len(running) < 8


def test_a_graph_grows_little_with_micro_batches(ranks: Start) -> None:
    sizes = {}
    for micro_batches in (2, 4):
        ranks(2, **setting("1f1b", micro_batches))
        _, step = trained(Chain(wh.stage, 2), wh.function)
        sizes[micro_batches] = [len(p.nodes) for p in step._step(batch(0), {}).compiled.ranks]
        wh.shutdown()
    edges = 3
    for few, many in zip(sizes[2], sizes[4]):
        assert (many - few) / 2 <= 40 * edges


class BothTrained(Towers):
    """What each row is compared with depends on a variable that the step writes."""

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        results = super().step(x, y)
        self.weights[1].assign_sub(0.1 * self.weights[1])
        return results


def test_a_loss_over_the_whole_batch_is_refused_unless_no_step_writes_what_it_is_made_of(ranks: Start) -> None:
    assert_equals_one_device(ranks, Towers, 3, **setting("1f1b", 4))
    wh.shutdown()
    ranks(3, **setting("1f1b", 4))
    with pytest.raises(PlanError, match="before the last one is finished"):
        trained(BothTrained(wh.stage), wh.function)


class Scoped(Chain):
    """A chain in a pipeline that a scope makes; without stages, gradients are accumulated."""

    def __init__(self, stage: Callable[..., Any], stages: int, micro_batches: int) -> None:
        super().__init__(stage if stages else nullcontext, stages or 1)
        self.pipeline = nullcontext() if stage is nullcontext else wh.pipeline(num_micro_batch=micro_batches)

    def losses(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with self.pipeline:
            return super().losses(x, y)


@pytest.mark.parametrize(
    ("stages", "count", "micro_batches", "config"),
    [(2, 4, 4, {}), (0, 2, 2, {}), (2, 2, 2, {"pipeline.micro_batches": 2})],
)
def test_the_scope_says_how_many_micro_batches(
    ranks: Start, stages: int, count: int, micro_batches: int, config: dict[str, Any]
) -> None:
    plan = assert_equals_one_device(
        ranks, lambda stage: Scoped(stage, stages, micro_batches), count, stages > 0, **config
    )
    assert plan.micro_batches == micro_batches
    assert len(plan.stage_groups) == stages


def test_a_pipeline_holds_for_what_is_created_under_it_and_for_what_it_decorates(ranks: Start) -> None:
    def loss_of(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x @ inside)

    ranks(2)
    with wh.pipeline(num_micro_batch=4), wh.stage():
        inside = weight(0, 6, 6)
    x, _ = batch(0)
    for step in (loss_of, wh.pipeline(4)(loss_of)):
        assert wh.function(step).plan(x).micro_batches == 4
    outside = wh.function(lambda x: tf.reduce_sum(x))
    with wh.pipeline(2):
        np.testing.assert_allclose(outside(x), tf.reduce_sum(x), rtol=1e-12)
    assert outside.plan(x).micro_batches == 2
    with pytest.raises(PlanError, match=r"(?s)different numbers.*given: wh\.pipeline\(num_micro_batch=4\), .*=3\)"):
        wh.function(lambda x: wh.pipeline(3)(tf.reduce_sum)(x) + loss_of(x)).plan(x)


def test_numbers_that_contradict_each_other_are_refused(ranks: Start) -> None:
    ranks(2, **{"pipeline.micro_batches": 1})
    with pytest.raises(PlanError, match=r"num_micro_batch=4\), pipeline.micro_batches=1 \(code\)"), wh.pipeline(4):
        pass
    for wrong in (0, True, 2.0):
        with pytest.raises(PlanError, match="integer of at least 1"), wh.pipeline(wrong):  # type: ignore[arg-type]
            pass
    for outer in (wh.stage(), wh.split()):
        with pytest.raises(PlanError, match="inside a stage or a split"), outer, wh.pipeline(1):
            pass
    with wh.pipeline(1), wh.pipeline(1):
        pass
