"""A few of the runs of ``python -m tests.pipelines``, the same each time."""

from __future__ import annotations

import random
from typing import Any

import pytest

import whale as wh
from tests.pipelines.compare import LIMIT, difference
from tests.pipelines.draws import Plan, Trained, Training, batches, difference_of, make_step
from tests.pipelines.matrix import LAYOUTS, Run, all_runs
from whale.errors import PlanError

REPLICAS = next(layout for layout in LAYOUTS if layout.name == "2 stages x 2 replicas")
SAMPLE = random.Random(7).sample(list(all_runs()), 5)
# A weight that several stages read, in a graph whose gradients were built outside all scopes.
SAMPLE += [run for run in all_runs() if str(run) == "tied embeddings, 4 micro-batches, 1f1b, adam, tf1"]
SAMPLE += [Run(REPLICAS, 4, "zb-h1", "adam", recompute=True, zero=3)]
SAMPLE += [Run(next(x for x in LAYOUTS if x.name == "2 stages x 2 x 2"), 4, "zb-h1")]
# Ranks without rows take part in gathers of fetched rows, which no stage reads.
SAMPLE += [Run(next(x for x in LAYOUTS if x.name == "interleaved x 2 x 2"), 7, "1f1b")]


@pytest.mark.parametrize("run", SAMPLE, ids=str)
def test_a_pipeline_is_as_one_device(run: Run) -> None:
    error, where = difference(run)
    assert error <= LIMIT, where


@pytest.mark.parametrize(
    ("layers", "optimizer", "extras"),
    [
        (("dense", "branch"), ("SGD", ()), ["scaled"]),
        (("branch", "loop"), ("SGD", ()), ["accumulated"]),
        (("dense", "loop"), ("SGD", (("use_ema", True), ("ema_overwrite_frequency", 2))), []),
    ],
)
def test_weights_of_loops_and_branches_that_are_updated_under_a_condition(
    layers: tuple[str, ...], optimizer: tuple[str, tuple[tuple[str, Any], ...]], extras: list[str]
) -> None:
    """Each stage has a condition of its own, with the same predicate."""
    plan = Plan(2, (0, 1), config=(("pipeline.micro_batches", 2),))
    error, where = difference_of(Training(1, layers, "mean", optimizer, frozenset(extras), (8, 8), (plan,)))
    assert error <= LIMIT, where


@pytest.mark.parametrize(
    ("optimizer", "extras"),
    [
        (("SGD", (("momentum", 0.9),)), ["accumulated"]),
        (("Adam", (("epsilon", 1e-3), ("global_clipnorm", 0.1))), ["accumulated", "scaled"]),
        (("Adam", (("epsilon", 1e-3), ("gradient_accumulation_steps", 2), ("use_ema", True))), ["scaled"]),
    ],
)
def test_updates_under_a_condition_leave_weights_in_their_stages(
    optimizer: tuple[str, tuple[tuple[str, Any], ...]], extras: list[str]
) -> None:
    training = Training(1, ("dense",) * 2, "mean", optimizer, frozenset(extras), (8,))
    wh.init({"communication.in_process_ranks": 2, "pipeline.micro_batches": 2})
    try:
        step = wh.function(make_step(Trained(training), training, (0, 1), wh.stage, ()))
        step(*next(batches(training)))
        (compiled,) = step._steps.values()
        sent = [edge for edge in compiled.compiled.plan.edges if "ReadVariableOp" in edge.ref.node]
    finally:
        wh.shutdown()
    assert all(edge.bytes <= 8 for edge in sent), sent  # numbers, such as the count of steps, may travel


def test_a_variance_of_the_batch_behind_weights_of_another_stage_is_fetched() -> None:
    """The first stage's sums change under a condition for which the variance is no reason to wait."""
    plan = Plan(2, (0, 1), config=(("pipeline.micro_batches", 2),))
    extras = frozenset(["accumulated", "metric"])
    error, where = difference_of(Training(1, ("dense",) * 2, "mean", ("SGD", ()), extras, (8, 8), (plan,)))
    assert error <= LIMIT, where


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_rows_that_a_rank_has_none_of_are_fetched(schedule: str) -> None:
    """Seven micro-batches of a row, in stages of two ranks and of one."""
    plan = Plan(6, (0, 1, 2, 3), config=(("pipeline.micro_batches", 4), ("pipeline.schedule", schedule)))
    extras = frozenset(["slopes", "rows"])
    error, where = difference_of(Training(1, ("dense",) * 4, "mean", ("SGD", ()), extras, (7,), (plan,)))
    assert error <= LIMIT, where


@pytest.mark.parametrize(("layers", "split"), [(("dense", "dense"), (0,)), (("gather", "gather"), (0, 1))])
def test_batches_of_two_sizes_under_split_scopes_whose_weights_a_condition_keeps_whole(
    layers: tuple[str, ...], split: tuple[int, ...]
) -> None:
    """A rank of a stage holds them whole after the first step, as in each; their readers take slices."""
    plan, extras = Plan(4, (0, 1), split=split), frozenset(["accumulated"])
    error, where = difference_of(Training(1, layers, "sum", ("SGD", ()), extras, (16, 8), (plan,)))
    assert error <= LIMIT, where


def test_a_mesh_that_the_stages_do_not_fill_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot be shared among the stages of the mesh\n  given: mesh stage=4, 2 st"):
        difference(Run(REPLICAS, 1, "1f1b"), mesh=wh.Mesh(stage=4))
