"""What is computed for each micro-batch, before the first and after the last one."""

from __future__ import annotations

import pytest

from tests.programs import Builder
from whale.ir.layout import shard
from whale.ir.program import Program, Ref
from whale.ir.values import DType, Func, TensorType
from whale.partition.pipeline.plan_microbatches import AFTER, BEFORE, EACH, time_plan, untie_microbatches


def _step(op: str) -> Program:
    """Gradients by rows of the batch; a part of a variable is read behind what each micro-batch computes."""
    b = Builder(dtype="float32")
    x, table = b.input("x", (8, 4)), b.variable("table", (5, 4))
    seen = b.op("Square", x, name="seen")
    if op == "ResourceGather":
        index = b.const(2, "int32", name="index")
    else:
        index = b.ints(2)
    row = b.node(op, (table, index), (TensorType("float32", (4,)),), "row", ["seen"], True, Tindices=DType("int32"))
    gradient = b.reduce("Sum", b.op("Mul", seen, row, name="scaled"), 0, name="gradient")
    weight = b.variable("weight", (4,))
    update = b.update("ResourceApplyGradientDescent", weight, b.const(0.1), gradient, name="update")
    return b.build([], [update])


@pytest.mark.parametrize("op", ["ResourceGather", "ResourceGatherNd"])
def test_each_micro_batch_may_look_a_row_up(op: str) -> None:
    program = untie_microbatches(_step(op))
    _, found = time_plan(program, 2, {"x": shard(0, (4, 4))})
    assert {found[name] for name in ("seen", "row", "scaled", "gradient")} == {EACH}
    assert found["table"] == BEFORE and found["update"] == AFTER
    assert program.by_name["row"].inputs[0] == Ref("table")


def test_an_update_under_a_condition_is_one_of_sums_that_are_as_large_as_the_batch() -> None:
    """As with a scaled loss: the gradient of eight units, of which a rank's micro-batches have eight rows."""
    b = Builder(dtype="float32")
    x = b.input("x", (8, 8))
    b.variable("weight", (8,))
    slope = b.op("Mul", b.reduce("Sum", b.op("Square", x), 0, name="slope"), b.const(0.5), name="unscaled")
    named = b.op("Identity", slope, name="named", T=DType("float32"))
    finite = b.node("IsFinite", (slope,), (TensorType("bool", (8,)),), "finite", T=DType("float32"))
    all_finite = b.node(
        "All", (finite, b.ints(0)), (TensorType("bool", ()),), "all", keep_dims=False, Tidx=DType("int32")
    )
    bodies = {}
    for name in ("then", "other"):
        body = Builder(name, "float32")
        handle, change = body.input(f"{name}_handle", (), "resource"), body.input(f"{name}_change", (8,))
        effects = []
        if name == "then":
            effects = [
                body.node("AssignSubVariableOp", (handle, change), (), "change", (), True, dtype=DType("float32")).node
            ]
        bodies[name] = body.build([], effects)
    b.functions |= bodies
    update = b.node("If", (all_finite, Ref("weight"), named), (), "update", (), True, then_branch=Func("then"),
                    else_branch=Func("other"), output_shapes=())  # fmt: skip
    program = untie_microbatches(b.build([], [update.node]))
    _, found = time_plan(program, 2, {"x": shard(0, (4, 4))})
    assert found["slope"] == EACH and found["update"] == AFTER


def test_what_waits_for_a_gradient_of_a_mean_over_a_mask_runs_in_each_micro_batch() -> None:
    """As with a counter that a step increments and draws by: what reads it keeps the edges by which it waits."""
    b = Builder(dtype="float32")
    x, mask = b.input("x", (8, 4)), b.op("Square", b.input("y", (8, 1)), name="mask")
    count, weight = b.variable("count", ()), b.variable("weight", (4, 4))
    counted = b.update("AssignAddVariableOp", count, b.const(1.0), name="counted")
    seen = b.op("Mul", x, b.read(count, controls=[counted], name="number"), name="seen")
    left = b.reduce("Sum", mask, 0, 1, name="left")
    slope = b.op("Mul", seen, b.op("RealDiv", mask, left, name="share"), name="slope")
    twice = b.op("AddV2", seen, seen, name="twice", controls=["slope"])  # as the gradient of SquaredDifference
    gradient = b.matmul(twice, slope, a=True, name="gradient")
    update = b.update("ResourceApplyGradientDescent", weight, b.const(0.1), gradient, name="update")
    program = untie_microbatches(b.build([], [counted, update]))
    assert program.by_name["twice"].controls == ("slope",)
    _, found = time_plan(program, 2, {"x": shard(0, (4, 4)), "y": shard(0, (4, 4))})
    assert found["left"] == BEFORE
    assert {found[name] for name in ("seen", "share", "slope", "twice", "gradient")} == {EACH}
