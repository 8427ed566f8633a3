"""Meshes of two axes: hand-written programs over groups of simulated ranks equal the global run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.interpreter import Outcome
from tests.lowering.compare import assert_equal_mesh
from tests.passes.layout.split.test_divide import classifier, scoped
from tests.programs import Builder, mlp
from whale.errors import PlanError
from whale.ir.plan import Plan
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.passes.settings import PlanSettings
from whale.runtime.compile.mesh import plan_program


def run_mesh(program: Program, groups: int, per_group: int, **changes: object) -> tuple[Plan, Outcome]:
    """The plan and the run, which equals the global one on every rank."""
    settings = PlanSettings(groups * per_group).but(split__ranks=per_group, **changes)
    plan = plan_program(program, settings)
    feeds = {}
    for name in program.inputs:
        t = program.by_name[name].outputs[0]
        if t.dtype == "int32":
            feeds[name] = np.asarray(np.random.default_rng(1).integers(0, 6, t.shape), np.int32)
    return plan, assert_equal_mesh(program, plan, settings, feeds)


@pytest.mark.parametrize(("groups", "per_group"), [(2, 2), (3, 2), (2, 3)])
def test_two_layers(groups: int, per_group: int) -> None:
    plan, spread = run_mesh(scoped(mlp(12, 12, 24, 6)), groups, per_group)
    assert plan.split_flops_fraction == 1.0 and plan.inner.split_flops_fraction == 1.0
    assert plan.variables == plan.inner.variables and plan.variables["w1"].dim == 1
    text = format_plan(plan)
    assert f"{groups} groups of {per_group} ranks (ranks 0 to {per_group - 1}, " in text
    assert f"Inside each group of {per_group} ranks" in text and "Split variables  " in text
    # Gradients of split weights are summed part by part: as many bytes as without groups of their own.
    parts = {key: n for key, n in plan.repeats.items() if "d_w" in key}
    assert parts and set(parts.values()) == {1}
    assert {call.attrs["ranks"] for call in spread.calls if "ranks" in call.attrs and call.op == "WhaleAllReduce"} > {
        tuple(range(per_group))
    }


@pytest.mark.parametrize("words", [0, 40], ids=["layer", "embedding"])
def test_a_classifier_beside_divided_rows(words: int) -> None:
    """Outside of the scope rows are divided over all ranks, inside the classes over the ranks of a group."""
    plan, _ = run_mesh(classifier(16, 32, 4000, "split_0", words), 2, 2)
    assert plan.inner.expanded == ("entropy",)
    assert plan.variables["w"].sizes == (2000, 2000)
    if not words:
        layer = plan.inner.strategies[""]["layer"]
        assert str(layer.inputs[0]) == "S(0)[4,4]"


def test_rows_may_be_divided_unevenly_within_groups() -> None:
    plan, _ = run_mesh(classifier(16, 32, 400, "split_0"), 2, 2, batch__shares=(5, 3, 5, 3))
    assert str(plan.inner.strategies[""]["layer"].inputs[0]) == "S(0)[5,3]"


def test_programs_without_split_scopes_have_one_axis() -> None:
    assert plan_program(mlp(), PlanSettings(4).but(split__ranks=2)).inner is None
    assert plan_program(scoped(mlp()), PlanSettings(4).but(split__ranks=4)).inner is None
    assert plan_program(scoped(mlp()), PlanSettings(2)).inner is None


def test_mistakes() -> None:
    program = scoped(mlp(8, 12, 24, 6))
    with pytest.raises(PlanError, match=r"equal groups\n  given: split.ranks=3, 4 ranks\n  expected: .*1 or 2 or 4"):
        plan_program(program, PlanSettings(4).but(split__ranks=3))
    with pytest.raises(PlanError, match=r"equal rows(.|\n)*9 rows of x(.|\n)*a multiple of 2 rows"):
        plan_program(scoped(mlp(9, 12, 24, 6)), PlanSettings(4).but(split__ranks=2))
    with pytest.raises(PlanError, match=r"equal rows(.|\n)*\[5, 1, 1, 1\]"):
        plan_program(program, PlanSettings(4).but(split__ranks=2, batch__shares=(5, 1, 1, 1)))
    with pytest.raises(PlanError, match="through Whale only"):
        plan_program(program, PlanSettings(4).but(split__ranks=2, exchange__backend="horovod"))
    looping = replace(program, functions={"body": Builder("body").build()})
    with pytest.raises(PlanError, match="loops or branches"):
        plan_program(looping, PlanSettings(4).but(split__ranks=2))
