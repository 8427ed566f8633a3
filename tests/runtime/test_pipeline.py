"""Micro-batches over stages: every schedule computes what one device computes, in its order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import whale as wh
from tests.runtime.test_stages import Chain, Tied, assert_equals_one_device, batch, trained
from whale.errors import PlanError
from whale.ir.schedule import schedule
from whale.ir.text import format_plan

Start = Callable[..., None]


def setting(name: str, micro_batches: int) -> dict[str, Any]:
    return {"pipeline.num_micro_batch": micro_batches, "pipeline.schedule": name}


@pytest.mark.parametrize(
    ("name", "stages", "count", "micro_batches"),
    [
        pytest.param("1f1b", 2, 2, 4, marks=pytest.mark.core),
        ("1f1b", 4, 4, 7),
        ("gpipe", 3, 3, 2),
        ("zb-h1", 2, 2, 4),
        ("zb-h1", 4, 4, 8),
        ("1f1b", 2, 4, 4),
        ("1f1b", 4, 2, 4),
    ],
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
    wanted = schedule(name, 3, 1, 4)
    for rank, program in enumerate(compiled.ranks):
        calls = [n for n in program.nodes if n.op == "StatefulPartitionedCall"]
        order = [n.name.rpartition("/")[2].replace("0_", "") for n in calls]
        # The first stage has no gradients of inputs, and no part of B beside W.
        expected = [str(p) for p in wanted[rank] if str(p)[0] in {name[0] for name in order}]
        assert order == expected
        for before, after in pairwise(calls):
            assert before.name in after.controls


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


def test_a_loss_over_the_whole_batch_is_refused(ranks: Start) -> None:
    from tests.runtime.test_stages import Towers

    ranks(3, **setting("1f1b", 4))
    with pytest.raises(PlanError, match="before the last one is through"):
        trained(Towers(wh.stage), wh.function)
