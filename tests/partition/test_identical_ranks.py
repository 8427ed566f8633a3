"""Plans by which all coordinates of an axis surely run what the first one runs, but for values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.programs import mlp, planned
from whale.ir.layout import FIRST, B, Partial, Placement, parse_placement
from whale.ir.plan import Plan, Reshard
from whale.ir.program import Program, Ref
from whale.partition.spmd import is_alike, is_surely_identical, partition_for_rank


def _alike(program: Program, plan: Plan) -> bool:
    first, *others = [partition_for_rank(program, plan, rank, "comm", None) for rank in range(plan.size)]
    return all(is_alike(first, other) for other in others)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2)])
def test_even_rows(sizes: tuple[int, ...]) -> None:
    program = mlp(rows=8)
    plan = planned(program, *sizes)
    assert is_surely_identical(program, plan) and _alike(program, plan)


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0)])
def test_uneven_rows(sizes: tuple[int, ...]) -> None:
    program = mlp(rows=8)
    plan = planned(program, *sizes)
    assert not is_surely_identical(program, plan) and not _alike(program, plan)


@pytest.mark.parametrize("change", [(B, Partial("sum")), (FIRST, B), (parse_placement("S(0)[4,4]"), FIRST)])
def test_what_one_does_for_all(change: tuple[Placement, Placement]) -> None:
    program = mlp(rows=8)
    plan = planned(program, 4, 4)
    extra = Reshard("", Ref(program.inputs[0]), change[0], change[1], "extra", 0)
    assert not is_surely_identical(program, replace(plan, reshards=(*plan.reshards, extra)))


def test_a_node_that_runs_once() -> None:
    program = mlp(rows=8)
    plan = planned(program, 4, 4)
    name = next(n.name for n in program.nodes if n.op == "Const")
    mine = {**plan.strategies[""], name: replace(plan.strategies[""][name], once=True)}
    assert not is_surely_identical(program, replace(plan, strategies={"": mine}))
