"""Gradients that are rounded before they are sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.programs import Builder, layouts_of, mlp, plan_of
from whale.errors import PlanError
from whale.ir.layout import Partial, shard
from whale.ir.plan import Plan, plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.values import DType, TensorType
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.reshards import explicit_reshards
from whale.passes.resharding.wire_dtype import narrow
from whale.passes.verify.check import check

ROWS = shard(0, (4, 4))
PROGRAM = mlp(dtype="float32")


def _planned(program: Program, group_bytes: int = 1 << 20) -> Plan:
    placed = dict.fromkeys(program.inputs, ROWS)
    layouts = layouts_of(program, 2, placed)
    reshards = narrow(program, layouts[""], explicit_reshards(program, layouts, 2), "bfloat16", 2)
    plan = plan_of(program, layouts, 2, placed)
    return replace(plan, reshards=fuse_all_reduces(program, layouts, reshards, group_bytes))


def _wire_dtypes(plan: Plan) -> dict[str, str]:
    return {r.ref.node: r.wire_dtype for r in plan.reshards if isinstance(r.source, Partial)}


def test_gradients_are_rounded_and_the_loss_is_not() -> None:
    plan = _planned(PROGRAM)
    check(PROGRAM, plan)
    gradients = dict.fromkeys(("d_w1", "d_b1", "d_w2", "d_b2"), "bfloat16")
    assert _wire_dtypes(plan) == {"loss": "", **gradients}
    assert {r.ref.node: r.bytes for r in plan.reshards if r.wire_dtype}["d_w1"] == 2 * 4 * 6 * 2
    (members,) = plan.groups.values()
    assert {m.ref.node for m in members} == set(gradients)


def test_what_the_computation_goes_on_with_is_not_rounded() -> None:
    b = Builder(dtype="float32")
    x, handle = b.input("x", (8, 4000)), b.variable("average", (4000,))
    total = b.op("Sum", b.op("Square", x), b.ints(0), name="statistic", keep_dims=False)
    update = b.update("AssignVariableOp", handle, total, name="keep")
    loss = b.op("Sum", b.op("Square", b.op("Mul", x, total)), b.ints(0, 1), name="loss", keep_dims=False)
    plan = _planned(b.build([loss], [update]))
    assert _wire_dtypes(plan) == {"statistic": "", "loss": ""}


def test_what_is_scattered_into_a_tensor_is_no_update() -> None:
    b = Builder(dtype="float32")
    x = b.input("x", (8, 4000))
    total = b.op("Sum", b.op("Square", b.op("Exp", x)), b.ints(0), name="statistic", keep_dims=False)
    kind = TensorType("float32", (4000, 2))
    places = b.const(np.stack([np.arange(4000), np.zeros(4000)], 1), "int32")
    shown = b.node("ScatterNd", [places, total, b.ints(4000, 2)], [kind], Tindices=DType("int32"), T=DType("float32"))
    assert _wire_dtypes(_planned(b.build([total, shown]))) == {"statistic": ""}


def test_other_types_are_not_rounded() -> None:
    assert set(_wire_dtypes(_planned(mlp())).values()) == {""}


def test_a_plan_keeps_wire_dtypes_and_shows_them() -> None:
    plan = _planned(PROGRAM)
    assert plan_from_json(plan.to_json()) == plan
    assert "all-reduce P(sum) -> B as bfloat16" in format_plan(plan)


def test_the_checker_refuses_what_cannot_be_rounded_and_bytes_that_do_not_fit() -> None:
    plan = _planned(PROGRAM, group_bytes=0)
    reshards = tuple(replace(r, wire_dtype="") if r.ref.node == "d_w1" else r for r in plan.reshards)
    with pytest.raises(PlanError, match="one that moves"):
        check(PROGRAM, replace(plan, reshards=reshards))
    reshards = tuple(replace(r, backend="horovod") if r.wire_dtype else r for r in plan.reshards)
    with pytest.raises(PlanError, match="as bfloat16"):
        check(PROGRAM, replace(plan, reshards=reshards))
