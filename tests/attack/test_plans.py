"""A plan from a file is proved before it is used: what was changed in it is refused, or does no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import whale as wh
from tests.attack.plans import fresh, judged, made, one_step, trained
from tests.runtime.compile.test_auto import double
from whale.errors import PlanError
from whale.ir.layout import B, Strategy
from whale.ir.plan import Plan, file_text

__all__ = ["double"]


@pytest.mark.long
def test_changed_plans_are_refused_or_train_as_one_device(ranks: Callable[..., None], tmp_path: Path) -> None:
    counts = judged(150, seed=25)
    assert counts.problems == []
    assert counts.unreadable > 10 and counts.illegal > 30
    moved = [(tree, config) for tree, config in counts.legal if tree.get("fingerprint")]
    assert trained(tmp_path, moved[:4], ranks) == []


def _without_operand(plan: Plan) -> Plan:
    """The plan with one operand layout gone that has to be there, and the change of layout before it."""
    moved = next(r for r in plan.reshards if str(r.source) == "P(sum)")
    return replace(plan, reshards=tuple(r for r in plan.reshards if r is not moved))


def _whole_operand(plan: Plan) -> Plan:
    name = next(n for n, s in plan.strategies[""].items() if "MatMul" in n and str(s.outputs[0]).startswith("S(0)"))
    changed = {**plan.strategies[""], name: Strategy((B, B), plan.strategies[""][name].outputs, "wrong")}
    return replace(plan, strategies={**plan.strategies, "": changed})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_operand, "or a reshard of the operand to it"),
        (_whole_operand, "MatMul"),
        (lambda plan: replace(plan, micro_batches=10**9), "1000000000 micro-batches, and the inputs have at most"),
        (lambda plan: replace(plan, returned={"": plan.returned[""][:-1]}), "placements of outputs"),
        (lambda plan: replace(plan, batch_inputs=(replace(plan.batch_inputs[0], name="z"),)), "no such input"),
    ],
    ids=["reshard", "strategy", "micro-batches", "returned", "batch"],
)
def test_an_illegal_plan_is_refused_before_it_runs(
    change: Callable[[Plan], Plan], said: str, ranks: Callable[..., None], tmp_path: Path
) -> None:
    change(made({})[0]).save(tmp_path / "plan.json")
    ranks(2, **{"mesh.plan": str(tmp_path / "plan.json")})
    with pytest.raises(PlanError, match="not legal for its program") as error:
        one_step()
    assert said in str(error.value) and str(tmp_path / "plan.json") in str(error.value)


def test_the_strategy_that_a_plan_says_is_read_at_the_start(ranks: Callable[..., None], tmp_path: Path) -> None:
    tree: dict[str, Any] = msgspec.json.decode(file_text(made({})[0].record()))
    for strategy in ("[", {"name": 3}, {"stages": [{"parts": [{"tensor": "two"}]}]}, {"recompute": "sometimes"}):
        (tmp_path / "plan.json").write_bytes(msgspec.json.encode(tree | {"strategy": strategy}))
        with pytest.raises(PlanError, match=r"the plan cannot be read(?s:.*)strategy"):
            ranks(2, **{"mesh.plan": str(tmp_path / "plan.json")})
        wh.shutdown()


def test_unchanged_it_runs(ranks: Callable[..., None], tmp_path: Path) -> None:
    made({})[0].save(tmp_path / "plan.json")
    ranks(2, **{"mesh.plan": str(tmp_path / "plan.json")})
    deep = fresh()
    deep.step(*deep.batch(0))
