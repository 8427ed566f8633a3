"""Explaining operations: the chain back to the batch, and alternatives that would move more."""

from __future__ import annotations

import pytest

from tests.programs import mlp
from whale.errors import PlanError
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import explain_operations, find_ops, list_op_rows
from whale.ir.program import Program
from whale.passes.pass_manager import make_plan, normalise
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings
from whale.passes.verify.explain import explain_matches


def test_a_product_is_explained_by_the_batch_and_by_what_else_would_cost() -> None:
    program, settings = _program()
    plan = make_plan(program, settings)
    product = next(n for n in program.nodes if n.op == "MatMul")
    text = "\n".join(explain_matches(expand(program, plan.expanded, settings), plan, product.name))
    batch = plan.batch_inputs[0]
    assert f"layout   {batch.placement} B -> {batch.placement}" in text
    assert f"{batch.name} is the batch, {batch.placement}" in text
    alternatives = [line for line in text.splitlines() if line.startswith("  else ")]
    assert any("B B -> B" in line and "x the work" in line for line in alternatives)
    assert all("+" in line for line in alternatives)  # what was chosen moves least


def test_a_saved_plan_is_explained_and_listed() -> None:
    program, settings = _program()
    plan = plan_from_json(make_plan(program, settings).to_json())
    moved = next(r for r in plan.reshards if r.bytes)
    assert any(f"{moved.source} -> {moved.target}" in line for line in explain_operations(plan, moved.ref.node))
    assert len(list_op_rows(plan)) == 1 + len(plan.strategies[""])
    with pytest.raises(PlanError, match="no such operation"):
        find_ops(plan, "nowhere")


def _program() -> tuple[Program, PlanSettings]:
    settings = PlanSettings(2)
    return normalise(mlp(), settings), settings
