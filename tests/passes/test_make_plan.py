"""The passes that plan, as a whole: the plan of a training step, its text, its repetition."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.partition.compare import assert_equal_runs
from tests.programs import Builder, mlp
from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import B, RankZero, shard
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.text import format_program, parse_program
from whale.ir.values import TensorType
from whale.passes.pass_manager import make_plan, normalise
from whale.passes.settings import BatchSettings, PlanSettings
from whale.passes.verify.check import check

TWO = PlanSettings(2, ("cpu:0", "cpu:1"), BatchSettings(shares=(5, 3)))


def _normal(settings: PlanSettings = TWO) -> Program:
    return normalise(mlp(), settings)


def test_the_plan_of_a_training_step_reads_well(golden: Callable[[str, str], None]) -> None:
    golden("plan_mlp", format_plan(make_plan(_normal(), TWO)))


def test_a_plan_with_ungrouped_sums_and_ops_without_rules_reads_well(golden: Callable[[str, str], None]) -> None:
    b = Builder("mixed")
    x, w = b.input("x", (12, 64)), b.variable("w", (64, 64))
    b.scope = "replica_0"
    product = b.matmul(x, b.read(w, name="read"), name="product")
    mixed = b.op("UnruledMix", product, name="mixed")
    noisy = b.node("UnruledNoise", (mixed,), (TensorType("float64", (12, 64)),), "noisy", stateful=True)
    b.scope = ""
    gradient = b.matmul(x, noisy, a=True, name="gradient")
    update = b.update("ResourceApplyGradientDescent", w, b.const(0.1), gradient, name="update")
    top = b.reduce("Max", b.op("Tanh", product), 0, name="top")
    devices = ("gpu:0", "gpu:1", "cpu:0")
    settings = PlanSettings(3, devices).but(batch__shares=(6, 5, 1), exchange__group_bytes=1024)
    program = normalise(b.build([b.reduce("Mean", noisy, 0, 1, name="mean"), top], [update]), settings)
    golden("plan_mixed", format_plan(make_plan(program, settings)))


def test_the_text_of_the_program_reads_well(golden: Callable[[str, str], None]) -> None:
    text = format_program(_normal())
    golden("program_mlp", text)
    assert parse_program(text) == _normal()


def test_planning_repeats_itself() -> None:
    first, second = make_plan(_normal(), TWO), make_plan(_normal(), TWO)
    assert first == second and first.to_json() == second.to_json()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_plans_are_legal_and_right(parts: int) -> None:
    settings = PlanSettings(parts)
    program = _normal(settings)
    plan = make_plan(program, settings)
    assert plan.fingerprint == compute_fingerprint(program) and plan.size == parts
    assert plan.devices == tuple(f"rank {i}" for i in range(parts))
    check(program, plan_from_json(plan.to_json()))
    assert_equal_runs(program, plan)
    assert (plan.logical_bytes > 0) == (parts > 1)
    assert plan.split_flops_fraction == (1.0 if parts > 1 else 0.0)
    # Three forward and backward products of layer 2 and two of layer 1, 2 FLOPs per multiply-add.
    assert plan.total_flops == 2 * 8 * (3 * 6 * 3 + 2 * 4 * 6)


def test_the_users_choices_are_kept() -> None:
    plan = make_plan(_normal(), TWO.but(batch__shares=(2, 6), batch__marked=("x", "y")))
    assert [(b.name, b.placement, b.origin) for b in plan.batch_inputs] == [
        ("x", shard(0, (2, 6)), "user (batch.inputs)"), ("y", shard(0, (2, 6)), "user (batch.inputs)"),
    ]  # fmt: skip
    assert make_plan(_normal(), TWO.but(exchange__group_bytes=0)).groups == {}


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot be split as `batch.shares` asks"):
        make_plan(_normal(), TWO.but(batch__shares=(5, 5, 5)))


def test_a_program_without_a_batch_is_computed_on_every_rank() -> None:
    b = Builder("alone")
    program = b.build([b.op("Neg", b.input("rate", ()))])
    plan = make_plan(program, TWO)
    assert plan.batch_inputs == () and plan.logical_bytes == 0
    assert {p for s in plan.strategies[""].values() for p in s.outputs} == {B}
    assert not any(isinstance(p, RankZero) for s in plan.strategies[""].values() for p in s.inputs)
