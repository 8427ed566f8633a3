"""The checker: legal plans pass, and every planted fault is found and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.partition.random_programs import placements, programs, random_layouts
from tests.programs import Builder, body, mlp, plan_of, planned
from whale.errors import PlanError
from whale.ir.layout import FIRST, P_MAX, P_SUM, B, Partial, Placement, Strategy, shard
from whale.ir.plan import Plan, Reshard
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType
from whale.passes.verify.check import check

ROWS, OTHER = shard(0, (5, 3)), shard(0, (4, 4))


def _with(plan: Plan, node: str, strategy: Strategy | None, graph: str = "") -> Plan:
    """``plan`` with another strategy at one node; None takes it away."""
    nodes = {n: s for n, s in plan.strategies[graph].items() if n != node}
    if strategy is not None:
        nodes[node] = strategy
    return replace(plan, strategies={**plan.strategies, graph: nodes})


def _reshards(plan: Plan, change: Callable[[Reshard], Reshard | None]) -> Plan:
    return replace(plan, reshards=tuple(r for old in plan.reshards if (r := change(old)) is not None))


def _of(name: str, **changes: Any) -> Callable[[Plan], Plan]:
    """Changes the reshards of one tensor."""
    return lambda plan: _reshards(plan, lambda r: replace(r, **changes) if r.ref.node == name else r)


def _strategy(
    node: str, inputs: str | tuple[Placement, ...], outputs: tuple[Placement, ...], once: bool = False
) -> Any:
    return lambda plan: _with(plan, node, Strategy(tuple(inputs), outputs, "planted", once))  # type: ignore[arg-type]


Planted = tuple[Callable[[Plan], Plan], str, dict[str, str]]
FAULTS: dict[str, Planted] = {
    "no strategy": (
        lambda p: _with(p, "relu", None), "relu (Relu)", {"given": "a plan without a strategy for this operation"},
    ),
    "operands miscounted": (
        _strategy("layer1", (ROWS,), (ROWS,)), "layer1 (MatMul)",
        {"expected": "placements of 2 operands and 1 outputs"},
    ),
    "outputs miscounted": (
        _strategy("relu", (ROWS,), ()), "relu (Relu)", {"expected": "placements of 1 operands and 1 outputs"},
    ),
    "partial sum through a non-linear op": (
        _strategy("relu", (P_SUM,), (P_SUM,)), "relu (Relu)",
        {"given": "the operand bias1:0, which is produced in the placement S(0)[5,3]"},
    ),
    "product over a cut sum that is called whole": (
        _strategy("d_w2", (ROWS, ROWS), (B,)), "d_w2 (MatMul)", {"given": "S(0)[5,3] S(0)[5,3] -> B"},
    ),
    "result said to be split along another dimension": (
        _strategy("layer1", (ROWS, B), (shard(1, (3, 3)),)), "layer1 (MatMul)", {},
    ),
    "gradient of the rows said to be split": (
        _strategy("d_w1", (ROWS, ROWS), (shard(0, (2, 2)),)), "d_w1 (MatMul)", {},
    ),
    "operand in a form that it is not in": (
        _strategy("layer2", (OTHER, B), (OTHER,)), "layer2 (MatMul)",
        {"expected": "the placement S(0)[4,4], or a reshard of the operand to it"},
    ),
    "an update on the first rank only": (
        _strategy("sgd_w1", (B, B, B), (), once=True), "sgd_w1 (ResourceApplyGradientDescent)",
        {"expected": "a run on every rank: what the operation changes is on all of them"},
    ),
    "an update of a split gradient": (
        _strategy("sgd_w1", (B, B, shard(0, (2, 2))), ()), "sgd_w1 (ResourceApplyGradientDescent)", {},
    ),
    "an input that is fed in parts": (
        _strategy("x", (), (ROWS,)), "x (Placeholder)", {"expected": "B, the placement in which it is passed in"},
    ),
    "run once, and called whole": (
        _strategy("rate", (), (B,), once=True), "rate (Const)",
        {"expected": "results on the first rank only (O), and operands replicated (B) or likewise O"},
    ),
    "missing reshard": (
        lambda p: _reshards(p, lambda r: None if r.ref.node == "d_w1" else r), "sgd_w1 (ResourceApplyGradientDescent)",
        {
            "given": "the operand d_w1:0, which is produced in the placement P(sum)",
            "expected": "the placement B, or a reshard of the operand to it",
        },
    ),
    "missing slice of an input": (
        lambda p: _reshards(p, lambda r: None if r.ref.node == "x" else r), "layer1 (MatMul)", {},
    ),
    "reshard from a form that is not there": (_of("d_w1", source=P_MAX), "sgd_w1 (ResourceApplyGradientDescent)", {}),
    "reshard that counts too little": (
        _of("d_w1", bytes=1), "d_w1 (MatMul)",
        {"given": "a reshard of d_w1:0 from P(sum) to B that moves 1 bytes", "expected": "one that moves 384 bytes"},
    ),
    "two reshards with one key": (_of("d_w1", key="/d_w2:0>B"), "d_w1 (MatMul)", {"expected": "keys that are unique"}),
    "reshard to the first rank of what others hold": (
        _of("d_w1", target=FIRST), "d_w1 (MatMul)",
        {"expected": "two reshards: to replicated (B), and from that to O"},
    ),
    "reshard between reductions": (
        _of("d_w1", target=P_MAX), "d_w1 (MatMul)",
        {"expected": "two reshards: to replicated (B), and from that to P(max)"},
    ),
    "sizes that do not add up": (
        _strategy("relu", (shard(0, (5, 4)),), (shard(0, (5, 4)),)), "relu (Relu)",
        {"expected": "sizes that add up to a dimension of the tensor"},
    ),
    "a size for each of three ranks": (
        _strategy("relu", (shard(0, (5, 2, 1)),), (shard(0, (5, 2, 1)),)), "relu (Relu)",
        {"expected": "2 sizes (one for each rank), none below 0"},
    ),
    "a size below zero": (
        _strategy("relu", (shard(0, (9, -1)),), (shard(0, (9, -1)),)), "relu (Relu)",
        {"expected": "2 sizes (one for each rank), none below 0"},
    ),
    "a dimension that is not there": (
        _strategy("relu", (shard(2, (5, 3)),), (shard(2, (5, 3)),)), "relu (Relu)",
        {"expected": "sizes that add up to a dimension of the tensor"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_found(what: str) -> None:
    plan = planned(mlp(), 5, 3)
    change, node, facts = FAULTS[what]
    faulty = change(plan)
    with pytest.raises(PlanError) as caught:
        check(mlp(), faulty)
    assert caught.value.facts["op"] == node
    assert {k: str(caught.value.facts[k]) for k in facts} == facts
    assert caught.value.action and caught.value.action.startswith("make the plan again with `whale plan`")


def test_the_plan_without_faults_passes() -> None:
    check(mlp(), planned(mlp(), 5, 3))


def test_what_the_program_lacks() -> None:
    plan = planned(mlp(), 5, 3)
    with pytest.raises(PlanError, match="a function that the program lacks"):
        check(mlp(), replace(plan, strategies={**plan.strategies, "gone": {}}))
    with pytest.raises(PlanError, match=r"a tensor that the program lacks(.|\n)*gone:0 of mlp"):
        check(mlp(), replace(plan, reshards=(*plan.reshards, Reshard("", Ref("gone"), P_SUM, B, "k", 0))))
    with pytest.raises(PlanError, match="relu:1 of mlp"):
        check(mlp(), replace(plan, reshards=(*plan.reshards, Reshard("", Ref("relu", 1), P_SUM, B, "k", 0))))
    with pytest.raises(PlanError, match="0 placements of outputs"):
        check(mlp(), replace(plan, returned={"": ()}))
    with pytest.raises(
        PlanError,
        match=r"op: loss \(Mean\)(.|\n)*given: the operand loss:0, which is produced in the placement P\(sum\)",
    ):
        check(mlp(), _reshards(plan, lambda r: None if r.ref.node == "loss" else r))


# -- fused collectives


def test_a_group_of_unlike_reshards() -> None:
    plan = planned(mlp(), 5, 3)
    mixed = _reshards(plan, lambda r: replace(r, group=0) if r.ref.node == "x" else r)
    with pytest.raises(
        PlanError,
        match=r"different kinds of reshards\n  given: group 0: x:0 B -> S\(0\)\[5,3\], loss:0 P\(sum\) -> B",
    ):
        check(mlp(), mixed)


def test_a_group_of_unlike_dtypes() -> None:
    b = Builder("dtypes")
    x = b.input("x", (8, 400))
    product = b.matmul(x, b.const(np.eye(400)), name="product")
    single = b.op("Cast", product, name="cast", SrcT="double", DstT="float32")
    sums = [b.reduce("Sum", product, 0, name="double"), b.reduce("Sum", single, 0, name="single")]
    program = b.build(sums)
    plan = planned(program, 5, 3)
    assert sum(isinstance(r.source, Partial) for r in plan.reshards) == 2
    mixed = _reshards(plan, lambda r: replace(r, group=0) if isinstance(r.source, Partial) else r)
    with pytest.raises(PlanError, match=r"mixes different kinds of reshards(.|\n)*double:0(.|\n)*single:0"):
        check(program, mixed)


def _two_sums(between: str) -> Program:
    """The second sum waits for the first: as an operand, or by a control edge."""
    b = Builder("chain")
    x, w = b.input("x", (8, 4)), b.input("w", (4, 4))
    first = b.matmul(x, b.matmul(x, w), a=True, name="first")
    seen = b.op("Tanh", first, name="seen")
    if between == "operand":
        second = b.matmul(x, b.matmul(x, seen, name="middle"), a=True, name="second")
    else:
        second = b.op(
            "MatMul", x, b.matmul(x, w), name="second", controls=["seen"], transpose_a=True, transpose_b=False
        )
    return b.build([seen, b.op("Tanh", second)])


@pytest.mark.parametrize("between", ["operand", "control edge"])
def test_a_group_that_waits_for_itself(between: str) -> None:
    program = _two_sums(between)
    rows = shard(0, (5, 3))
    plan = planned(program, 5, 3, x=rows)
    assert plan.groups == {}, "grouping itself keeps them apart"
    fused = _reshards(plan, lambda r: replace(r, group=0) if r.ref.node in ("first", "second") else r)
    with pytest.raises(PlanError, match="waits for its own result") as caught:
        check(program, fused)
    path = caught.value.facts["given"]
    assert "group 0" in path and "seen" in path and "second" in path


def test_two_groups_that_wait_for_each_other() -> None:
    """Each group holds an early sum and a late one that needs the other group's early sum."""
    b = Builder("crossed")
    x = b.input("x", (8, 4))
    early = [b.matmul(x, b.op("Mul", x, b.const(f)), a=True, name=f"early{i}") for i, f in enumerate((1.0, 2.0))]
    late = [
        b.matmul(x, b.matmul(x, b.op("Tanh", e), name=f"middle{i}"), a=True, name=f"late{i}")
        for i, e in enumerate(early)
    ]
    program = b.build([b.op("Tanh", v) for v in late])
    plan = planned(program, 5, 3)
    numbers = {"early0": 0, "late1": 0, "early1": 1, "late0": 1}
    fused = _reshards(plan, lambda r: replace(r, group=numbers.get(r.ref.node, -1)))
    with pytest.raises(PlanError, match=r"waits for its own result(.|\n)*group 0(.|\n)*group 1|group 1(.|\n)*group 0"):
        check(program, fused)


# -- loops, branches, handles


def _loop() -> Program:
    shapes: list[tuple[int, ...]] = [(), (8, 40), (40,)]
    inner, (i, x, total) = body("body", *shapes)
    moved = inner.op("Tanh", inner.matmul(x, inner.const(np.eye(40)), name="product"))
    added = inner.op("AddV2", total, inner.reduce("Sum", moved, 0), name="added")
    stop, (j, _, _) = body("cond", *shapes)
    b = Builder("loop")
    state = [b.const(0.0), b.input("x", (8, 40)), b.const(np.zeros(40))]
    b.loop(stop.build([stop.op("Less", j, stop.const(3.0), name="less")]),
           inner.build([inner.op("AddV2", i, inner.const(1.0)), moved, added]), *state)  # fmt: skip
    return b.build(b.nodes[-1].list_refs())


LOOP_FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "states that change their layout": (
        lambda p: _with(p, "loop", Strategy((B, ROWS, P_SUM), (B, ROWS, B), "")), r"op: loop \(StatelessWhile\)",
    ),
    "an argument that is passed otherwise": (
        lambda p: _with(p, "body_arg1", Strategy((), (B,), ""), "body"),
        r"op: body_arg1 \(Placeholder\)(.|\n)*expected: S\(0\)\[5,3\]",
    ),
    "an argument of the condition": (
        lambda p: _with(p, "cond_arg1", Strategy((), (B,), ""), "cond"), r"op: cond_arg1 \(Placeholder\)",
    ),
    "a result that is returned otherwise": (
        lambda p: replace(p, returned={**p.returned, "body": (B, ROWS, ROWS)}), r"op: added \(AddV2\)|op: loop",
    ),
    "a condition that is not whole": (
        lambda p: replace(p, returned={**p.returned, "cond": (P_SUM,)}), r"op: (less|loop) ",
    ),
    "a fault inside": (
        lambda p: _with(p, "product", Strategy((ROWS, B), (B,), ""), "body"), r"op: product \(MatMul\)",
    ),
    "no strategies for the body": (
        lambda p: replace(p, strategies={g: s for g, s in p.strategies.items() if g != "body"}),
        "lacks a graph(.|\n)*'body'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LOOP_FAULTS)
def test_faults_of_loops(what: str) -> None:
    plan = planned(_loop(), 5, 3)
    assert plan.strategies[""]["loop"].inputs == (B, ROWS, P_SUM)
    check(_loop(), plan)
    change, message = LOOP_FAULTS[what]
    with pytest.raises(PlanError, match=message):
        check(_loop(), change(plan))


def test_a_branch_that_returns_otherwise() -> None:
    then, (t,) = body("then", (8, 40))
    other, (e,) = body("other", (8, 40))
    b = Builder("branch")
    x, yes = b.input("x", (8, 40)), b.op("Less", b.const(0.0), b.const(1.0), name="yes")
    eye = np.eye(40)
    b.branch(yes, then.build([then.matmul(t, then.const(eye))]), other.build([other.matmul(e, other.const(eye))]), x)
    program = b.build(b.nodes[-1].list_refs())
    plan = planned(program, 5, 3)
    check(program, plan)
    with pytest.raises(
        PlanError,
        match=r"branch \(StatelessIf\)(.|\n)*the function other, which the operation calls, returns B"
        r"(.|\n)*results in the placements S\(0\)\[5,3\]",
    ):
        # The matrix product of the other branch is gathered before it returns.
        reshard = Reshard("other", other.nodes[-1].list_refs()[0], ROWS, B, "gather", 8 * 40 * 8)
        check(program, replace(plan, returned={**plan.returned, "other": (B,)}, reshards=(*plan.reshards, reshard)))


def test_handles_cannot_be_sent() -> None:
    b = Builder("handles")
    queue = b.node("UnruledQueue", (), (TensorType("resource", ()),), "queue", stateful=True)
    size = b.node("UnruledSize", (queue,), (TensorType("int32", ()),), "size")
    program = b.build([size])
    plan = planned(program, 4, 4)
    check(program, plan)
    everywhere = _with(plan, "size", Strategy((B,), (B,), "planted"))
    sent = replace(everywhere, reshards=(*plan.reshards, Reshard("", queue, FIRST, B, "send", 0)))
    with pytest.raises(PlanError, match=r"op: size \(UnruledSize\)(.|\n)*a reshard of queue:0, resource\[\], to B"):
        check(program, sent)


def test_a_stateful_op_without_a_rule_on_every_rank() -> None:
    b = Builder("stateful")
    noise = b.node("UnruledNoise", (b.input("x", (8, 4)),), (TensorType("float64", (8, 4)),), "noise", stateful=True)
    program = b.build([noise])
    plan = planned(program, 5, 3)
    with pytest.raises(PlanError, match=r"op: noise \(UnruledNoise\)(.|\n)*on the first rank only"):
        check(program, _with(plan, "noise", Strategy((B,), (B,), "planted")))


def test_a_variable_that_only_the_first_rank_changes() -> None:
    b = Builder("update")
    handle = b.variable("w", (4,))
    program = b.build([], [b.update("UnruledApply", handle, b.input("x", (4,)), name="update")])
    plan = planned(program, 2, 2)
    check(program, plan)
    with pytest.raises(
        PlanError, match=r"op: update \(UnruledApply\)(.|\n)*what the operation changes is on all of them"
    ):
        check(program, _with(plan, "update", Strategy((B, B), (), "planted", once=True)))


def test_an_op_without_a_rule_on_parts() -> None:
    b = Builder("unruled")
    x = b.matmul(b.input("x", (8, 4)), b.const(np.eye(4)))
    program = b.build([b.op("UnruledMix", x, name="mixed")])
    plan = planned(program, 5, 3)
    with pytest.raises(
        PlanError, match=r"op: mixed \(UnruledMix\)(.|\n)*replicated \(B\) for all .*: the op has no sharding rule"
    ):
        check(program, _with(plan, "mixed", Strategy((ROWS,), (ROWS,), "planted")))


# -- plans at random


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(programs(), st.integers(2, 3), st.integers(0, 10**6), st.data())
def test_no_reshard_is_superfluous(program: Program, parts: int, seed: int, data: st.DataObject) -> None:
    """Every legal plan passes (``plan_of`` checks it); taking any one reshard away is found."""
    placed: Mapping[str, Placement] = data.draw(placements(program, parts))
    plan = plan_of(program, random_layouts(program, parts, placed, seed), parts, placed)
    assume(plan.reshards)
    gone = data.draw(st.sampled_from(plan.reshards))
    lacking = replace(plan, reshards=tuple(r for r in plan.reshards if r is not gone))
    with pytest.raises(PlanError, match="or a reshard of the operand to it"):
        check(program, lacking)
