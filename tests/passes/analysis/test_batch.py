"""Which inputs carry the batch, task graphs, and functions of their own for every loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.programs import Builder, body, mlp
from whale.errors import PlanError
from whale.ir.layout import shard
from whale.ir.plan import TaskGraph
from whale.ir.program import Program
from whale.ir.values import Func
from whale.passes.analysis.axes import data_coordinates
from whale.passes.analysis.batch import batch_inputs, rows_of_ranks
from whale.passes.normalize.annotate import annotate, task_graphs
from whale.passes.normalize.inline import specialise
from whale.passes.pass_manager import make_plan, normalise
from whale.passes.settings import PlanSettings


def _inputs(**shapes: tuple[int | None, ...]) -> Program:
    b = Builder()
    for name, shape in shapes.items():
        b.input(name, shape)
    return b.build([])


def test_inputs_that_share_the_first_ones_rows() -> None:
    program = _inputs(rate=(), x=(8, 4), mask=(8,), table=(6, 8))
    found = batch_inputs(program, 3)
    assert [(b.name, b.placement) for b in found] == [("x", shard(0, (3, 3, 2))), ("mask", shard(0, (3, 3, 2)))]
    assert {b.origin for b in found} == {"rule: dimension 0 has the size of the first input's"}


def test_an_input_without_rows_is_not_the_batch() -> None:
    found = batch_inputs(_inputs(x=(8, 4), nothing=(0,)), 2)
    assert [b.name for b in found] == ["x"]


def test_marked_inputs_and_shares() -> None:
    program = _inputs(x=(8, 4), aux=(8,), late=(6, 1))
    (found,) = batch_inputs(program, 2, shares=(6, 0), marked=("late",))
    assert (found.name, found.placement, found.origin) == ("late", shard(0, (6, 0)), "user (batch.inputs)")


def test_marked_inputs_that_this_program_does_not_read() -> None:
    """One configuration serves all programs of a run: a prediction takes no labels."""
    (found,) = batch_inputs(_inputs(x=(8, 4)), 2, marked=("x", "labels"))
    assert found.name == "x"


def test_shares_tell_the_batch_from_other_inputs() -> None:
    program = _inputs(indices=(23, 2), values=(23,), x=(8, 4), y=(8,))
    found = batch_inputs(program, 3, shares=(5, 3, 0))
    assert [b.name for b in found] == ["x", "y"]
    assert {b.origin for b in found} == {"rule: dimension 0 has the rows of batch.shares"}


@pytest.mark.parametrize("changes", [{"batch__shares": (5, 3, 0)}, {"batch__marked": ("x",)}])
def test_a_run_that_divides_nothing_has_no_batch(changes: dict[str, Any]) -> None:
    """A value to load into a variable is whole, whatever its size; what is computed from its rows is not."""
    settings = PlanSettings(2).but(**changes)
    b = Builder()
    value, handle = b.input("value", (6, 4)), b.variable("w", (6, 4))
    load = b.update("AssignVariableOp", handle, value)
    assert make_plan(normalise(b.build([], [load]), settings), settings).batch_inputs == ()
    product = b.matmul(value, b.const(np.ones((4, 2))))
    with pytest.raises(PlanError, match=r"given: shares|given: x"):
        make_plan(normalise(b.build([product], [load]), settings), settings)


def test_no_input_with_rows() -> None:
    assert batch_inputs(_inputs(rate=(), unknown=(None, 3)), 2) == ()
    assert batch_inputs(_inputs(), 2) == ()


def test_strings_and_handles_carry_no_batch() -> None:
    b = Builder()
    b.input("names", (8,), "string")
    b.input("handles", (8,), "resource")
    assert batch_inputs(b.build([]), 2) == ()


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, (5, 0, 3)), (4, (3, 0, 1)), (1, (1, 0, 0)), (0, (0, 0, 0)), (16, (10, 0, 6))]
)
def test_batches_of_another_size_are_shared_in_proportion(rows: int, sizes: tuple[int, ...]) -> None:
    (found,) = batch_inputs(_inputs(x=(rows, 4)), 3, shares=(5, 0, 3))
    assert found.placement == shard(0, sizes)
    assert ("in proportion to batch.shares" in found.origin) == (rows != 8)


def test_shares_of_coordinates_are_divided_evenly_among_their_ranks() -> None:
    assert rows_of_ranks(8, 4, (5, 3), (0, 0, 1, 1)) == (3, 2, 2, 1)
    assert rows_of_ranks(8, 4, (5, 3), (0, 1, 0, 1)) == (3, 2, 2, 1)
    assert data_coordinates({"tensor": 2}, 4) == data_coordinates({"data": 2, "tensor": 2}, 4) == (0, 0, 1, 1)
    with pytest.raises(PlanError, match=r"4 numbers, not all 0.*, or 2, one for each coordinate of the axis data"):
        rows_of_ranks(8, 4, (5, 2, 1), (0, 0, 1, 1))


@pytest.mark.parametrize("shares", [(8,), (4, 2, 2), (0, 0)])
def test_shares_that_do_not_fit(shares: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        batch_inputs(_inputs(x=(8, 4)), 2, shares=shares)
    assert caught.value.facts["given"] == f"shares {list(shares)} for 2 ranks"
    assert caught.value.facts["expected"] == "2 numbers, not all 0, for example [4, 4]"
    assert caught.value.action == "change the key `batch.shares`, or the number of ranks"


def test_rows_that_a_rank_brings() -> None:
    program = _inputs(scale=(3,), x=(8, 4), mask=(8,), y=(8, 1))
    found = batch_inputs(program, 2, shares=(1, 1), local={"x": (7, 1), "y": (7, 1)})
    assert [(b.name, b.placement, b.local) for b in found] == [
        ("x", shard(0, (7, 1)), True), ("mask", shard(0, (7, 1)), False), ("y", shard(0, (7, 1)), True)
    ]  # fmt: skip


def test_rows_that_a_rank_brings_in_two_ways() -> None:
    with pytest.raises(PlanError, match="divide the batch differently") as caught:
        batch_inputs(_inputs(x=(8, 4), y=(8,)), 2, local={"x": (4, 4), "y": (5, 3)})
    assert caught.value.facts["given"] == "x: [4, 4], y: [5, 3]"


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("xx", "name 'x' in `batch.inputs`"),
        ("rate", "name an input of rank 1 or more in `batch.inputs`, or remove the key"),
    ],
)
def test_marked_inputs_that_cannot_be_divided(name: str, action: str) -> None:
    with pytest.raises(PlanError) as caught:
        batch_inputs(_inputs(rate=(), x=(8, 4)), 2, marked=(name,))
    assert caught.value.facts == {"given": name, "expected": "one of x"} and caught.value.action == action


def test_marked_inputs_when_none_can_be_divided() -> None:
    with pytest.raises(PlanError, match="an input of rank 1 or more; it has none"):
        batch_inputs(_inputs(rate=()), 2, marked=("rate",))


# -- task graphs


def _towers() -> Program:
    """Two scopes, one after the other; gradients and updates have none yet."""
    b = Builder()
    x = b.input("x", (8, 4))
    b.scope = "replica_0/stage_0"
    w = b.variable("w", (4, 4))
    h = b.matmul(x, b.read(w, name="read_w"), name="first")
    b.scope = "replica_0/stage_1"
    v = b.variable("v", (4, 2))
    out = b.matmul(h, b.read(v, name="read_v"), name="second")
    b.scope = ""
    d_v = b.matmul(h, b.op("Square", out, name="square"), a=True, name="d_v")
    rate = b.const(0.1, name="rate")
    updates = [b.update("ResourceApplyGradientDescent", v, rate, d_v, name="update_v")]
    updates.append(
        b.update("ResourceApplyGradientDescent", w, rate, b.const([[0.0] * 4] * 4, name="zero"), name="update_w")
    )
    return b.build([out], updates)


def test_updates_join_the_scope_of_their_variable() -> None:
    program = annotate(_towers())
    scope = {n.name: n.scope for n in program.nodes}
    first, second = "replica_0/stage_0", "replica_0/stage_1"
    assert scope["update_v"] == second and scope["update_w"] == first
    assert scope["d_v"] == first, "its first annotated operand is the first stage's output"
    assert scope["square"] == second and scope["zero"] == first and scope["x"] == first
    assert {v.node: v.scope for v in program.variables} == {"w": first, "v": second}
    assert "" not in scope.values()


def test_annotating_twice_changes_nothing() -> None:
    once = annotate(_towers())
    assert annotate(once) == once


def test_a_program_without_scopes_is_left_alone() -> None:
    program = mlp()
    assert annotate(program) is program
    assert task_graphs(program, (0, 1)) == (TaskGraph("(default)", "replica", (0, 1), len(program.nodes)),)


def test_one_task_graph_per_scope() -> None:
    rows = task_graphs(annotate(_towers()), (0, 1))
    assert [(t.scope, t.kind) for t in rows] == [("replica_0/stage_0", "stage"), ("replica_0/stage_1", "stage")]
    assert sum(t.nodes for t in rows) == len(_towers().nodes)


# -- functions


def test_every_loop_has_functions_of_its_own() -> None:
    """Two loops share a body, and the body holds a branch: nothing is called from two places afterwards."""
    then, (t,) = body("then", ())
    other, (e,) = body("other", ())
    step, (x,) = body("step", ())
    chosen = step.branch(
        step.op("Less", x, step.const(1.0)), then.build([then.op("Neg", t)]), other.build([e]), x, name="pick"
    )
    stop, (i,) = body("stop", ())
    cond = stop.build([stop.op("Less", i, stop.const(3.0))])
    b = Builder()
    b.functions |= step.functions
    inner = step.build([chosen])
    first = b.loop(cond, inner, b.const(0.0), name="a")
    second = b.loop(cond, inner, first, name="b")
    program = specialise(b.build([second]))
    assert set(program.functions) == {
        "a/cond", "a/body", "a/body/pick/then_branch", "a/body/pick/else_branch",
        "b/cond", "b/body", "b/body/pick/then_branch", "b/body/pick/else_branch",
    }  # fmt: skip
    assert program.by_name["a"].attrs["body"] == Func("a/body")
    assert program.functions["b/body"].by_name["pick"].attrs["then_branch"] == Func("b/body/pick/then_branch")
    assert all(f.functions == {} and name == f.name for name, f in program.functions.items())
