"""Random programs, placements and strategies: the ranks together compute what one device computes."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lowering.compare import assert_equal_runs, lowered
from tests.lowering.random_programs import placements, programs, random_layouts
from tests.lowering.talk import assert_ranks_agree
from tests.programs import layouts_of, plan_of
from whale.ir.fingerprint import fingerprint
from whale.ir.plan import plan_from_json
from whale.ir.program import Program

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
