"""Meshes of named axes: hand-written programs over groups of simulated ranks equal the global run."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tests.interpreter import Outcome
from tests.partition.compare import assert_equal_mesh
from tests.partition.test_spmd import looping
from tests.passes.autoshard.test_divide import carried, classifier, scoped
from tests.programs import Builder, body, mlp
from whale.errors import PlanError
from whale.ir.layout import shard
from whale.ir.mesh import Axis, count_moved_along, find_tiles, iterate_levels
from whale.ir.plan import Plan
from whale.ir.plan_text import format_bytes, format_plan
from whale.ir.program import Program, Ref
from whale.partition import axis_partitioner
from whale.partition.lower import lower_ranks, make_any_plan
from whale.partition.mesh import plan_program
from whale.partition.spmd import partition_for_rank
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings


def run_mesh(program: Program, groups: int, per_group: int, **changes: object) -> tuple[Plan, Outcome]:
    """The plan and the run, which equals the global one on every rank."""
    settings = PlanSettings(groups * per_group, mesh=(Axis("tensor", per_group),)).but(**changes)
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
    assert not plan.variables and plan.inner.variables["w1"].dim == 1
    text = format_plan(plan)
    assert f"Mesh data={groups},tensor={per_group}: " in text and "Split variables  " in text
    assert f"Along tensor, in each group of {per_group} ranks" in text
    words = [line.split() for line in text.splitlines() if line.startswith(("  data=", "  tensor="))]
    along = {axis: rest for axis, *rest in words if rest[0] != "moves"}
    assert along[f"data={groups}"][2] == "+".join(str(c * per_group) for c in range(groups))
    assert along[f"tensor={per_group}"][2] == "+".join(map(str, range(per_group)))
    assert sum(count_moved_along(plan)) == plan.logical_bytes
    assert [" ".join(line[:2]) for line in along.values()] == [format_bytes(n) for n in count_moved_along(plan)]
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
    assert find_tiles(plan)["w"].cuts[0].sizes == (2000, 2000)
    if not words:
        layer = plan.inner.strategies[""]["layer"]
        assert str(layer.inputs[0]) == "S(0)[4,4]"


def test_sums_over_both_axes_are_one() -> None:
    """The layer outside of the scope has rows on every rank."""
    plan, spread = run_mesh(classifier(16, 32, 400, "split_0"), 2, 2)
    (r,) = (r for r in plan.reshards if r.ref == Ref("d_u"))
    over_all = [c for c in spread.calls if c.key.startswith(r.key)]
    assert {c.attrs["ranks"] for c in over_all} == {(0, 1, 2, 3)}
    within = [c for c in spread.calls if "d_u" in c.key and c not in over_all]
    assert not within, "none within a group beside it"
    moved = sum(count_moved_along(plan))
    assert moved == plan.logical_bytes


def test_rows_may_be_divided_unevenly_within_groups() -> None:
    plan, _ = run_mesh(classifier(16, 32, 400, "split_0"), 2, 2, batch__shares=(5, 3, 5, 3))
    assert str(plan.inner.strategies[""]["layer"].inputs[0]) == "S(0)[5,3]"


def test_programs_without_split_scopes_have_one_axis() -> None:
    assert plan_program(mlp(), PlanSettings(4, mesh=(Axis("tensor", 2),))).inner is None
    assert plan_program(scoped(mlp()), PlanSettings(4, mesh=(Axis("tensor", 4),))).inner is None
    assert plan_program(scoped(mlp()), PlanSettings(2)).inner is None


def test_mistakes() -> None:
    program = scoped(mlp(8, 12, 24, 6))
    with pytest.raises(PlanError, match=r"do not fill the mesh\n  given: mesh tensor=3, 4 ranks"):
        plan_program(program, PlanSettings(4, mesh=(Axis("tensor", 3),)))
    with pytest.raises(PlanError, match=r"does not use all ranks\n  given: mesh data=1,tensor=2, 4 ranks"):
        plan_program(program, PlanSettings(4, mesh=(Axis("data", 1), Axis("tensor", 2))))


@pytest.mark.parametrize("rows", [(5, 3, 1, 0), (3, 2, 2, 2), (1, 0, 0, 8)])
def test_groups_may_have_unequal_rows(rows: tuple[int, ...]) -> None:
    plan, _ = run_mesh(scoped(mlp(9, 12, 24, 6)), 2, 2, batch__shares=rows)
    assert str(plan.batch_inputs[0].placement) == f"S(0)[{sum(rows[:2])},{sum(rows[2:])}]", (
        "a group reads the same rows"
    )
    plan, _ = run_mesh(classifier(9, 32, 400, "split_0"), 2, 2, batch__shares=rows)
    assert plan.split_flops_fraction == 1.0


def test_rows_that_groups_cannot_have_alike() -> None:
    plan, _ = run_mesh(classifier(9, 32, 400, "split_0"), 2, 2)
    assert str(plan.batch_inputs[0].placement) == "S(0)[3,2,2,2]"


def test_ranks_of_an_axis_that_every_input_arrives_under_have_the_same_rows() -> None:
    plan, _ = run_mesh(scoped(mlp(9, 12, 24, 6)), 2, 2)
    assert str(plan.batch_inputs[0].placement) == "S(0)[5,4]"
    assert plan.inner.batch_inputs == ()
    assert run_axes(scoped(mlp(3, 12, 24, 6)), ("data", 3), ("tensor", 4)).ranks == 12


def run_axes(program: Program, *axes: tuple[str, int], **changes: object) -> Plan:
    """The plan over named axes, of which the run equals the global one on every rank."""
    mesh = tuple(Axis(*axis) for axis in axes)
    settings = PlanSettings(prod(a.size for a in mesh), mesh=mesh).but(**changes)
    plan = plan_program(program, settings)
    assert_equal_mesh(program, plan, settings)
    return plan


def two_scopes() -> Program:
    """An MLP whose first layer is divided over one axis and whose second one over another."""
    program = scoped(mlp(12, 12, 24, 6))
    second = {"w2", "w2/read", "hidden"}
    reads = {n.name for n in program.nodes if any(r.node in second or r.node == "w2" for r in n.inputs)} | second
    nodes = tuple(replace(n, scope="split_1(axis=expert)") if n.name in reads else n for n in program.nodes)
    variables = tuple(replace(v, scope="split_1(axis=expert)") if v.node == "w2" else v for v in program.variables)
    return replace(program, nodes=nodes, variables=variables)


@pytest.mark.parametrize("shares", [(), (4, 1, 2, 1, 0, 2, 1, 1)], ids=["even", "uneven"])
def test_three_axes(shares: tuple[int, ...]) -> None:
    plan = run_axes(two_scopes(), ("data", 2), ("tensor", 2), ("expert", 2), batch__shares=shares)
    assert [p.axis for p in iterate_levels(plan)] == ["data", "tensor", "expert"]
    assert plan.ranks == 8 and {"w1", "w2"} <= set(find_tiles(plan))
    assert set(plan.inner.inner.variables) == {"w2"}


@pytest.mark.parametrize("hidden", [24, 20], ids=["even", "uneven"])
def test_a_scope_over_two_axes_divides_a_weight_over_both(hidden: int) -> None:
    plan = run_axes(scoped(mlp(12, 12, hidden, 8), "split_0(axis=data+tensor)"), ("data", 3), ("tensor", 2))
    assert find_tiles(plan)["w1"].count == find_tiles(plan)["w2"].count == 6


@pytest.mark.parametrize("level", [1, 3])
def test_state_of_what_an_axis_divides_is_divided_over_the_rows_as_well(level: int) -> None:
    """The optimizer's, and at level 3 the weights themselves: along the dimension that the scope leaves."""
    program = scoped(mlp(12, 12, 24, 8))
    plan = run_axes(program, ("data", 2), ("tensor", 2), zero__level=level)
    tiles = find_tiles(plan)
    weights = {name: found.axes for name, found in tiles.items() if name in ("w1", "w2")}
    assert set(weights.values()) == {("data", "tensor") if level == 3 else ("tensor",)}


def test_four_axes_of_which_neighbours_that_divide_rows_are_one() -> None:
    plan = run_axes(scoped(mlp(12, 12, 24, 6)), ("host", 2), ("data", 2), ("tensor", 3))
    assert [(p.axis, p.size) for p in iterate_levels(plan)] == [("host_data", 4), ("tensor", 3)]


def test_an_axis_without_a_size_gets_the_ranks_that_are_left() -> None:
    plan = run_axes(scoped(mlp(12, 12, 24, 6)), ("tensor", 2), ("data", 2))
    assert [p.axis for p in iterate_levels(plan)] == ["tensor", "data"]
    settings = PlanSettings(6, mesh=(Axis("tensor", 2),))
    assert [(p.axis, p.size) for p in iterate_levels(plan_program(scoped(mlp(12, 12, 24, 6)), settings))] == [
        ("data", 3),
        ("tensor", 2),
    ]
    named = plan_program(two_scopes(), PlanSettings(6, mesh=(Axis("tensor", 3),)))
    assert [(p.axis, p.size) for p in iterate_levels(named)] == [("tensor", 3), ("expert", 2)]


@pytest.mark.parametrize("shares", [(), (3, 2, 1, 0)], ids=["even", "uneven"])
@pytest.mark.parametrize("talks", [False, True], ids=["local body", "body that reduces"])
def test_loops(talks: bool, shares: tuple[int, ...]) -> None:
    plan, spread = run_mesh(looping(6, talks, "split_0"), 2, 2, batch__shares=shares)
    assert plan.inner is not None
    inside = [c for c in spread.calls if c.key.startswith("body/")]
    along_rows = [c for c in inside if c.op == "WhaleAllReduce"]
    assert len(along_rows) == (3 if talks else 0), "a reduction per iteration, over both axes"


def test_what_is_divided_goes_through_loops_and_branches() -> None:
    plan = run_axes(carried(), ("data", 2), ("tensor", 2))
    assert set(find_tiles(plan)) == {"w1", "w2"}
    assert plan.inner.strategies[""]["loop"].outputs[1] == shard(1, (12, 12))


def _summing(op: str, nested: str) -> Program:
    """A branch sums over the batch, reads the sum itself and returns it, and so does a loop or branch around it.

    The next branch needs it, as a gradient's does, and so does the main graph.
    """

    def choose(b: Builder, flag: Ref, x: Ref) -> tuple[Ref, ...]:
        b.branch(flag, then.build([divided, total]), other.build([other.op("Neg", y), one]), x)
        return b.nodes[-1].list_refs()

    then, (x,) = body("then", (8, 4))
    total = then.op("Mul" if op == "Sum" else "AddV2", then.reduce(op, x, 0, 1), then.const(2.0))
    divided = then.op("Tanh", then.op("Mul", x, total))
    other, (y,) = body("other", (8, 4))
    one = other.op("Fill", other.ints(), other.const(1.0))
    b = Builder("summing")
    x = b.input("x", (8, 3))
    b.scope = "split_0"
    layer = b.matmul(x, b.read(b.variable("w", (3, 4))), name="layer")
    flag = b.op("Less", b.reduce("Sum", layer, 0, 1), b.const(1e3))
    if nested == "loop":
        turn, (count, state, _) = body("turn", (), (8, 4), ())
        made = choose(turn, turn.op("Less", count, turn.const(5.0)), state)
        step = turn.build([turn.op("AddV2", count, turn.const(1.0)), *made])
        until, (count, _, _) = body("until", (), (8, 4), ())
        b.functions |= step.functions
        b.loop(until.build([until.op("Less", count, until.const(3.0))]), step, b.const(0.0), layer, b.const(1.0))
        rows, number = b.nodes[-1].list_refs()[1:]
    elif nested == "branch":
        yes, (x,) = body("yes", (8, 4))
        chosen = yes.build(choose(yes, yes.op("Less", yes.reduce("Max", x, 0, 1), yes.const(1e3)), x))
        no, (y,) = body("no", (8, 4))
        b.functions |= chosen.functions
        b.branch(flag, chosen, no.build([no.op("Neg", y), no.op("Fill", no.ints(), no.const(1.0))]), layer)
        rows, number = b.nodes[-1].list_refs()
    else:
        rows, number = choose(b, flag, layer)
    (last, (u, v)), (unlike, (x, _)) = body("last", (8, 4), ()), body("unlike", (8, 4), ())
    scaled = last.build([last.op("Mul", u, last.op("Square", v))])
    result = b.branch(flag, scaled, unlike.build([unlike.op("Neg", x)]), rows, number, name="next")
    return b.build([result, b.op("Square", number)])


@pytest.mark.parametrize("nested", ["", "branch", "loop"])
@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        ({"data": 2, "tensor": 2}, ()),
        ({"data": 2, "tensor": 2}, (5, 5, 3, 3)),
        ({"data": 2, "tensor": 2}, (8, 8, 0, 0)),
        ({"data": 3, "tensor": 2}, (0, 0, 3, 3, 5, 5)),
        ({"tensor": 3, "data": 2}, (5, 3) * 3),
        ({"data": 2, "other": 2, "tensor": 2}, ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["Max", "Sum"])
def test_groups_sum_alike_what_a_body_returns(
    op: str, axes: dict[str, int], shares: tuple[int, ...], nested: str
) -> None:
    """Only the first group holds the sum that a body returns; the others hold a constant, and join no sum to it."""
    run_axes(_summing(op, nested), *axes.items(), batch__shares=shares)


def test_a_rank_of_a_stage_lowers_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each axis, whatever its coordinates: neither the other stages nor what the first coordinates run."""
    program = scoped(mlp(12, 12, 24, 6))
    of_stage = {n.name: int("w2" in n.name or "logits" in n.name) for n in program.nodes}
    staged = (replace(n, scope="/".join(filter(None, (f"stage_{of_stage[n.name]}", n.scope)))) for n in program.nodes)
    settings = PlanSettings(8, mesh=(Axis("stage", 2), Axis("data", 2), Axis("tensor", 2)))
    program = normalise(program.replace_nodes(tuple(staged)), settings)
    plan = make_any_plan(program, settings)
    assert len(plan.stage_groups) == 2 and plan.inner is not None
    sizes: list[int] = []

    def partitioned(part: Program, *rest: object) -> Program:
        sizes.append(len(part.nodes))
        return partition_for_rank(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(axis_partitioner, "partition_for_rank", partitioned)
    for rank in range(8):
        sizes.clear()
        lower_ranks(program, plan, settings, [rank])
        assert len(sizes) == 2, f"rank {rank}: of {sizes} nodes"
