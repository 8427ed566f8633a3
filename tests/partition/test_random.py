"""Random programs, placements and strategies: the ranks together compute what one device computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.partition.compare import assert_equal_mesh, assert_equal_runs, lowered
from tests.partition.random_programs import placements, programs, random_layouts
from tests.partition.talk import assert_ranks_agree
from tests.programs import layouts_of, plan_of
from whale.config import Mesh
from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.mesh import Axis
from whale.ir.plan import BatchInput, Plan, plan_from_json
from whale.ir.program import Program
from whale.partition.mesh import plan_program
from whale.passes.pass_manager import make_plan
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings

RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
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


@settings(RELAXED, max_examples=40)
@given(programs(), st.integers(2, 4), st.integers(0, 10**6), st.data())
def test_split_scopes(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    """Any nodes under a split scope, the inputs' rows divided in any way, variables split between steps or not."""
    placed = data.draw(placements(program, parts))
    batch = tuple(BatchInput(n, p, "test") for n, p in placed.items())
    settings = PlanSettings(parts).but(batch__inputs=batch, split__state_only=data.draw(st.booleans()))
    scoped = _partly_split(program, seed)
    plan = _planned(lambda: make_plan(scoped, settings))
    assert_equal_runs(expand(scoped, plan.expanded, settings), plan)


MESHES = ["data=2,tensor=2", "data=3,tensor=2", "data=2,tensor=3", "tensor=2,data=2", "data=2,tensor=2,expert=2"]


@settings(RELAXED, max_examples=30)
@given(programs(), st.sampled_from(MESHES), st.integers(0, 10**6), st.data())
def test_meshes(program: Program, mesh: str, seed: int, data: st.DataObject) -> None:
    axes = tuple(Axis(*axis) for axis in Mesh.parse(mesh).items())
    ranks = prod(a.size for a in axes)
    shares = tuple(data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(any)))
    settings = PlanSettings(ranks, mesh=axes).but(batch__shares=shares if data.draw(st.booleans()) else ())
    scoped = _partly_split(program, seed, ["split_0", "split_1(axis=expert)"][: len(axes) - 1])
    plan = _planned(lambda: plan_program(scoped, settings))
    assume(plan.inner is not None)
    assert_equal_mesh(scoped, plan, settings)


def _partly_split(program: Program, seed: int, scopes: Sequence[str] = ("split_0",)) -> Program:
    draw = random.Random(seed)
    inside = {n.name: draw.choice(scopes) for n in program.nodes if draw.random() < draw.choice([0.5, 1.0])}
    nodes = (replace(n, scope=inside.get(n.name, n.scope)) for n in program.nodes)
    return replace(program, nodes=tuple(nodes))


def _planned(make: Callable[[], Plan]) -> Plan:
    """The plan, if the program has something to split and rows that make equal groups."""
    try:
        return make()
    except PlanError as error:
        assume(not str(error).startswith("nothing under a split scope"))
        raise


@settings(RELAXED, max_examples=100)
@given(programs(), st.integers(1, 4), st.integers(0, 10**6), st.data())
def test_ranks_agree_and_lowering_repeats_itself(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    placed = data.draw(placements(program, parts))
    plan = plan_of(program, random_layouts(program, parts, placed, seed), parts, placed)
    ranks = lowered(program, plan)
    assert_ranks_agree(ranks)
    assert [compute_fingerprint(p) for p in lowered(program, plan)] == [compute_fingerprint(p) for p in ranks]
    assert lowered(program, plan_from_json(plan.to_json())) == ranks, "a plan read from its file lowers alike"
    assert all(p.inputs == program.inputs and p.variables == program.variables for p in ranks)
    assert [[p.find_type(r) for r in p.outputs] for p in ranks] == [
        [program.find_type(r) for r in program.outputs]
    ] * parts
