"""Random programs, placements and strategies: the ranks together compute what one device computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.lowering.compare import assert_equal_mesh, assert_equal_runs, lowered
from tests.lowering.random_programs import placements, programs, random_layouts
from tests.lowering.talk import assert_ranks_agree
from tests.programs import layouts_of, plan_of
from whale.errors import PlanError
from whale.ir.fingerprint import fingerprint
from whale.ir.plan import BatchInput, Plan, plan_from_json
from whale.ir.program import Program
from whale.passes.lay_out import expand
from whale.passes.order import make_plan
from whale.passes.settings import PlanSettings
from whale.runtime.compile.mesh import plan_program

RELAXED = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@RELAXED
@given(programs(), st.integers(1, 4), st.sampled_from([0, 200, 1 << 20]), st.data())
def test_the_cheapest_plan(program: Program, parts: int, group_bytes: int, data: st.DataObject) -> None:
    placed = data.draw(placements(program, parts))
    layouts = layouts_of(program, parts, placed, reduced=data.draw(st.booleans()))
    assert_equal_runs(program, plan_of(program, layouts, parts, placed, group_bytes))


@RELAXED
@given(programs(), st.integers(2, 4), st.integers(0, 10**6), st.data())
def test_any_legal_plan(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    placed = data.draw(placements(program, parts))
    layouts = random_layouts(program, parts, placed, seed)
    assert_equal_runs(program, plan_of(program, layouts, parts, placed))


@settings(RELAXED, max_examples=80)
@given(programs(), st.integers(2, 4), st.integers(0, 10**6), st.data())
def test_split_scopes(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    """Any nodes under a split scope, the inputs' rows divided in any way, variables split between steps or not."""
    placed = data.draw(placements(program, parts))
    batch = tuple(BatchInput(n, p, "test") for n, p in placed.items())
    settings = PlanSettings(parts).but(batch__inputs=batch, split__at_rest=data.draw(st.booleans()))
    scoped = _partly_split(program, seed)
    plan = _planned(lambda: make_plan(scoped, settings))
    assert_equal_runs(expand(scoped, plan.expanded, settings), plan)


@settings(RELAXED, max_examples=40)
@given(programs(), st.sampled_from([(4, 2), (6, 2), (6, 3)]), st.integers(0, 10**6))
def test_groups_of_ranks_that_split(program: Program, mesh: tuple[int, int], seed: int) -> None:
    settings = PlanSettings(mesh[0]).but(split__ranks=mesh[1])
    scoped = _partly_split(program, seed)
    plan = _planned(lambda: plan_program(scoped, settings))
    assume(plan.inner is not None)
    assert_equal_mesh(scoped, plan, settings)


def _partly_split(program: Program, seed: int) -> Program:
    draw = random.Random(seed)
    inside = {n.name for n in program.nodes if draw.random() < draw.choice([0.5, 1.0])}
    nodes = (replace(n, scope="split_0") if n.name in inside else n for n in program.nodes)
    return replace(program, nodes=tuple(nodes))


def _planned(make: Callable[[], Plan]) -> Plan:
    """The plan, if the program has something to split and rows that make equal groups."""
    try:
        return make()
    except PlanError as error:
        assume(not str(error).startswith(("nothing under a split scope", "the groups of ranks do not get equal rows")))
        raise


@settings(RELAXED, max_examples=60)
@given(programs(), st.integers(1, 4), st.integers(0, 10**6), st.data())
def test_ranks_agree_and_lowering_repeats_itself(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    placed = data.draw(placements(program, parts))
    plan = plan_of(program, random_layouts(program, parts, placed, seed), parts, placed)
    ranks = lowered(program, plan)
    assert_ranks_agree(ranks)
    assert [fingerprint(p) for p in lowered(program, plan)] == [fingerprint(p) for p in ranks]
    assert lowered(program, plan_from_json(plan.to_json())) == ranks, "a plan read from its file lowers alike"
    assert all(p.inputs == program.inputs and p.variables == program.variables for p in ranks)
    assert [[p.type_of(r) for r in p.outputs] for p in ranks] == [[program.type_of(r) for r in program.outputs]] * parts
