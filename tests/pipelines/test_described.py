"""A plan of a described model runs a script's model with the same layers, which then equals one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from cost_model.cluster import cluster_file
from tests.draws import one_of
from tests.pipelines.gpt_on_ranks import Sizes, trained
from whale.errors import PlanError
from whale.ir.layout import Shard
from whale.ir.mesh import iterate_levels
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.planner import ask
from whale.planner.report import planfile
from whale.planner.run_described import Blocks, find_repetition, ranks_of

UNEQUAL = """
name: unequal
networks: {fabric: {type: infiniband-hdr-200}}
hosts:
  - {name: new, devices: [{type: v100-sxm2-16gb, count: NEW}], networks: {fabric: {nics: 1}}, memory_gb: 64}
  - {name: old, devices: [{type: p100-pcie-16gb, count: OLD}], networks: {fabric: {nics: 1}}, memory_gb: 64}
"""
SIZES = Sizes()
MODEL = "gpt:layers=4,hidden=32,heads=4,sequence=16,vocabulary=64,batch=16"
nothing = contextlib.nullcontext


def saved(path: Path, fixed: list[str], model: str = MODEL, devices: tuple[int, int] = (4, 4)) -> planfile.PlanFile:
    transformer, batch = ask.describe(model)
    where = cluster_file.parse(UNEQUAL.replace("NEW", str(devices[0])).replace("OLD", str(devices[1])))
    plan = ask.plan(where, batch, transformer, limits=ask.limits(fixed))
    planfile.save(plan, path)
    return plan


@pytest.fixture(scope="module")
def one_device() -> dict[str, np.ndarray]:
    return trained(SIZES, 1, nothing, nothing, tf.function)[0]


@contextlib.contextmanager
def ranks(path: Path, count: int = 8, **more: Any) -> Iterator[None]:
    wh.init({"communication.in_process_ranks": count, **more}, plan=path)
    try:
        yield
    finally:
        wh.shutdown()


@pytest.mark.parametrize(
    ("fixed", "stages", "mesh"),
    one_of(
        4,
        [
            (["stages=2", "tensor=2", "data=2", "micro_batches=4", "zero=0"], 2, {"data": 2, "tensor": 2}),
            pytest.param(
                ["stages=2", "chunks=2", "data=2", "tensor=2", "micro_batches=4", "zero=0"],
                2,
                {"data": 2, "tensor": 2},
                marks=pytest.mark.long,
            ),
            pytest.param(
                ["stages=4", "data=2", "tensor=1", "micro_batches=4", "zero=0"], 4, {}, marks=pytest.mark.long
            ),
            (["stages=1", "tensor=4", "data=2", "micro_batches=1", "zero=0"], 0, {"data": 2, "tensor": 4}),
            (
                ["stages=1", "tensor=2", "data=2", "context=2", "micro_batches=2", "zero=0"],
                0,
                {"data": 2, "context": 2, "tensor": 2},
            ),
            pytest.param(
                ["stages=2", "tensor=1", "data=1", "context=4", "micro_batches=4", "zero=0"],
                2,
                {"data": 1, "context": 4},
                marks=pytest.mark.long,
            ),
            (["stages=1", "tensor=1", "data=8", "micro_batches=2", "zero=3"], 0, {}),
            pytest.param(
                ["stages=2", "tensor=1", "data=4", "micro_batches=2", "recompute=full", "zero=1"],
                2,
                {},
                marks=pytest.mark.long,
            ),
        ],
        several=True,
    ),
    ids=[
        "stages-data-tensor",
        "interleaved",
        "stages",
        "data-tensor",
        "data-context-tensor",
        "stages-context",
        "zero-3",
        "recompute",
    ],
)
def test_a_described_plan_runs_as_one_device(
    fixed: list[str], stages: int, mesh: dict[str, int], one_device: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    described = saved(path, fixed)
    with ranks(path, **{"memory.zero_min_bytes": 0}):
        found, step = trained(SIZES, 1, nothing, nothing, wh.function)
        plan = next(iter(step._steps.values())).compiled.plan
    for key, value in one_device.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-11, err_msg=key)
    assert len(plan.stage_groups) == stages
    assert plan.micro_batches == described.strategy.micro_batches
    if mesh:
        levels = [(level.axis, level.size) for level in iterate_levels(plan) if level.size > 1]
        assert levels == [one for one in mesh.items() if one[1] > 1]
    if "zero=3" in fixed:
        assert plan.variables  # they lie split


EXPERTS = Sizes(layers=2, experts=4)


@pytest.mark.parametrize(
    ("fixed", "mesh"),
    one_of(
        2,
        [
            (["stages=1", "tensor=1", "data=8", "micro_batches=1", "zero=0", "experts=2"], {"data": 4, "expert": 2}),
            (["stages=2", "tensor=2", "data=2", "micro_batches=2", "zero=0", "experts=2"], {"expert": 2, "tensor": 2}),
        ],
        several=True,
    ),
    ids=["data-expert", "stages-expert-tensor"],
)
def test_experts_are_divided_as_the_plan_says(fixed: list[str], mesh: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = "moe:layers=2,hidden=32,heads=4,sequence=16,vocabulary=64,experts=4,batch=16"
    assert saved(path, fixed, model, (8, 8)).strategy.expert_ranks == 2
    expected = trained(EXPERTS, 1, nothing, nothing, tf.function)[0]
    with ranks(path, **{"memory.zero_min_bytes": 0}):
        found, step = trained(EXPERTS, 1, nothing, nothing, wh.function)
        plan = next(iter(step._steps.values())).compiled.plan
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-11, err_msg=key)
    assert {level.axis: level.size for level in iterate_levels(plan) if level.size > 1} == mesh
    levels = {level.axis: level for level in iterate_levels(plan)}
    halves = [one for one in levels["expert"].variables.values() if isinstance(one, Shard) and one.dim == 0]
    assert len(halves) >= 2  # experts of the first stage's layers


UNLIKE = ParallelStrategy(
    (
        Stage(((0, 3),), (DeviceGroup(0, 2, 1, 3), DeviceGroup(1, 2, 1, 1))),
        Stage(((3, 4),), (DeviceGroup(0, 1, 2, 1), DeviceGroup(1, 1, 2, 1))),
    ),
    micro_batches=4,
    sequence_parallel=True,
    zero=3,
)


@pytest.mark.long
def test_stages_may_be_unlike_in_all_that_a_stage_has(one_device: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Layers, tensor-parallel ranks, rows of replicas; ZeRO over replicas of sharded tensors; the script has scopes."""
    path = tmp_path / "plan.json"
    planfile.save(msgspec.structs.replace(saved(path, []), strategy=UNLIKE), path)
    with ranks(path, **{"memory.zero_min_bytes": 0}):
        found, step = trained(SIZES, 2, wh.stage, wh.split, wh.function)
        plan = next(iter(step._steps.values())).compiled.plan
    for key, value in one_device.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-11, err_msg=key)
    first, second = plan, plan.others[0]
    assert [level.size for level in iterate_levels(first)] == [2, 2] and [
        level.size for level in iterate_levels(second)
    ] == [4]
    assert [group.ranks for group in plan.stage_groups] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [one.batch_inputs[0].placement.sizes for one in (first, second)] == [(2, 1, 1, 0), (1,) * 4]
    assert all(any(level.variables for level in iterate_levels(one)) for one in (first, second))  # in parts


def test_rows_are_shared_as_the_plan_says(one_device: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    big = "gpt:layers=4,hidden=32,heads=4,sequence=16,vocabulary=64,batch=16"
    strategy = saved(path, ["stages=1", "tensor=1", "data=3", "micro_batches=1"], big, (1, 2)).strategy
    rows = [part.rows for part in strategy.stages[0].parts for _ in range(part.replicas)]
    assert sum(rows) == 16 and len(set(rows)) > 1
    with ranks(path, 3):
        found, step = trained(SIZES, 1, nothing, nothing, wh.function)
        (batch, *_) = next(iter(step._steps.values())).compiled.plan.batch_inputs
    assert sorted(batch.placement.sizes) == sorted(rows)
    for key, value in one_device.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-11, err_msg=key)


STAGED = ["stages=2", "tensor=2", "data=2", "micro_batches=4", "zero=0"]


@pytest.mark.parametrize(
    ("model", "fixed", "said"),
    [
        (MODEL.replace("layers=4", "layers=6"), STAGED, "given: 4 blocks of 6 weights.*expected: 6 layers"),
        (MODEL.replace("hidden=32", "hidden=64"), STAGED, "given: 12,288 elements.*query.*expected: 49,152: hidden=64"),
        (MODEL.replace("batch=16", "batch=32"), STAGED, "given: 16 rows in a batch\n  expected: 32"),
    ],
    ids=["layers", "hidden", "rows"],
)
def test_another_model_is_refused(model: str, fixed: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path, fixed, model)
    with ranks(path), pytest.raises(PlanError, match=f"(?s){said}"):
        trained(SIZES, 1, nothing, nothing, wh.function)


@pytest.mark.parametrize(
    ("strategy", "said"),
    one_of(
        2,
        [
            (
                ParallelStrategy((Stage(((0, 4),), (DeviceGroup(0, 2, 2, 4), DeviceGroup(1, 1, 4, 2))),), 1),
                "over 1 and 2 ranks.*--set tensor=N",
            ),
            (
                ParallelStrategy(
                    (Stage(((0, 4),), (DeviceGroup(0, 1, 4, 2), DeviceGroup(1, 1, 4, 2))),), 1, offload="optimizer"
                ),
                "offload of optimizer",
            ),
        ],
        several=True,
    ),
    ids=["tensors", "offload"],
)
def test_what_cannot_run_is_refused(strategy: ParallelStrategy, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planfile.save(msgspec.structs.replace(saved(path, []), strategy=strategy), path)
    with ranks(path), pytest.raises(PlanError, match=f"(?s)program cannot run under the plan.*{said}"):
        trained(SIZES, 1, nothing, nothing, wh.function)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path, STAGED)
    said = r"(?s)8 ranks, of which 4 run.*--set of stages, data and tensor that use 4 of the 8"
    with pytest.raises(PlanError, match=said), ranks(path, 4):
        pass


def test_blocks_are_what_repeats_itself() -> None:
    a, b, c, d = (1,), (2,), (3,), (4,)
    assert find_repetition([a, b, c, b, c, b, c, d]) == Blocks(1, 2, 3)
    assert find_repetition([a, b, b, b, b]) == Blocks(1, 1, 4)
    assert find_repetition([a, b, c]) == Blocks(0, 3, 1)
    assert find_repetition([]) == Blocks(0, 1, 1)


def test_neighbours_divide_tensors(tmp_path: Path) -> None:
    plan = saved(tmp_path / "plan.json", STAGED)
    machines = planfile.Machines(plan.cluster)
    stages = ranks_of(plan.strategy, machines)
    assert sorted(stages) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    pool = plan.strategy.stages[0].parts[0].pool
    assert stages[0] == ((0, 1, 2, 3) if pool == 0 else (4, 5, 6, 7))
