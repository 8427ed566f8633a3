"""Ranks that run the same but for values are planned in time once, and run what each would run alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.partition.test_mesh import scoped
from tests.programs import mlp
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.mesh import Axis
from whale.ir.program import Program
from whale.partition.lower import lower_ranks, make_any_plan
from whale.partition.pipeline import microbatches, stage_schedule
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings

pytestmark = pytest.mark.core


def staged(program: Program) -> Program:
    of_stage = {n.name: int("w2" in n.name or "logits" in n.name) for n in program.nodes}
    nodes = (replace(n, scope="/".join(filter(None, (f"stage_{of_stage[n.name]}", n.scope)))) for n in program.nodes)
    return program.replace_nodes(tuple(nodes))


@pytest.mark.parametrize(
    ("mesh", "shares", "most"),
    [
        ({"data": 8}, (), 1),
        ({"data": 4}, (6, 6, 6, 14), 2),
        ({"data": 2, "tensor": 4}, (), 2),
        ({"stage": 2, "data": 2, "tensor": 2}, (), 3),  # what both stages would run, and each stage's part
        ({"stage": 2, "data": 4}, (6, 6, 6, 14), 6),
    ],
)
def test_ranks_that_run_the_same_are_planned_in_time_once(
    mesh: dict[str, int], shares: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = tuple(Axis(name, size) for name, size in mesh.items())
    size = 1
    for axis in axes:
        size *= axis.size
    program = scoped(mlp(32, 12, 24, 6))
    program = staged(program) if "stage" in mesh else program
    settings = PlanSettings(size, mesh=axes).but(time__micro_batches=2, batch__shares=shares)
    program = normalise(program, settings)
    plan = make_any_plan(program, settings)
    made: list[str] = []
    for where in (microbatches, stage_schedule):

        def counted(one: Program, *rest: Any, usual: Any = where.time_plan) -> Any:
            made.append(one.name)
            return usual(one, *rest)

        monkeypatch.setattr(where, "time_plan", counted)
    together = lower_ranks(program, plan, settings, range(size))
    assert 0 < len(made) <= most
    alone = [lower_ranks(program, plan, settings, [rank])[0] for rank in range(size)]
    assert [compute_fingerprint(one) for one in together] == [compute_fingerprint(one) for one in alone]
