"""Which sums go through Horovod, and programs that use it by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.programs import Builder, layouts_of, mlp, plan_of, planned
from whale.errors import PlanError, ProgramError
from whale.ir.layout import Partial, shard
from whale.ir.plan import Plan, plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.values import TensorType
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.horovod import give_to_horovod, refuse_horovod
from whale.passes.resharding.reshards import explicit_reshards
from whale.passes.verify.check import check

ROWS = shard(0, (4, 4))


def _planned(program: Program, group_bytes: int = 1 << 20) -> Plan:
    placed = dict.fromkeys(program.inputs, ROWS)
    layouts = layouts_of(program, 2, placed)
    reshards = give_to_horovod(program, layouts[""], explicit_reshards(program, layouts, 2))
    plan = plan_of(program, layouts, 2, placed)
    return replace(plan, reshards=fuse_all_reduces(program, layouts, reshards, group_bytes))


def _backends(plan: Plan) -> dict[str, str]:
    return {r.ref.node: r.backend for r in plan.reshards if isinstance(r.source, Partial)}


def _normalised() -> Program:
    """A batch statistic, then a loss of what it normalises; the statistic is fetched as well."""
    b = Builder()
    x = b.input("x", (8, 4))
    total = b.op("Sum", b.op("Square", x), b.ints(0), name="statistic", keep_dims=False)
    scaled = b.op("Mul", x, b.op("Square", total), name="scaled")
    loss = b.op("Sum", b.op("Square", scaled), b.ints(0, 1), name="loss", keep_dims=False)
    return b.build([total, loss])


def test_gradients_and_loss_go_through_horovod() -> None:
    plan = _planned(mlp())
    assert _backends(plan) == dict.fromkeys(("loss", "d_w1", "d_b1", "d_w2", "d_b2"), "horovod")
    assert len(plan.groups) == 1
    check(mlp(), plan)


def test_what_later_communication_waits_for_stays_with_whale() -> None:
    plan = _planned(_normalised())
    assert _backends(plan) == {"statistic": "whale", "loss": "horovod"}
    check(_normalised(), plan)


def test_a_sum_without_a_kernel_of_horovod_stays_with_whale() -> None:
    def backends(dtype: str) -> dict[str, str]:
        b = Builder(dtype=dtype)
        x = b.input("x", (8, 400))
        x = b.node("Tanh", [x], [TensorType(dtype, (8, 400))])
        total = b.node("Sum", [x, b.ints(0, 1)], [TensorType(dtype, ())], "total", keep_dims=False)
        return _backends(_planned(b.build([total])))

    assert backends("float16") == {"total": "horovod"}
    assert backends("bfloat16") == {"total": "whale"}


def test_a_plan_keeps_backends_and_shows_them() -> None:
    plan = _planned(mlp())
    assert plan_from_json(plan.to_json()) == plan
    text = format_plan(plan)
    assert "5 of the tensors through Horovod" in text
    assert "all-reduce P(sum) -> B through Horovod" in text
    assert "Horovod" not in format_plan(planned(mlp(), 4, 4))


def test_the_checker_refuses_what_horovod_cannot_do() -> None:
    b = Builder()
    x = b.input("x", (8, 400))
    program = b.build([b.op("Max", b.op("Square", x), b.ints(0, 1), name="largest", keep_dims=False)])
    layouts = layouts_of(program, 2, {"x": ROWS})
    reshards = tuple(replace(r, backend="horovod") for r in explicit_reshards(program, layouts, 2))
    with pytest.raises(PlanError, match="through the backend 'horovod'"):
        check(program, replace(planned(program, 4, 4), reshards=reshards))


def test_the_checker_refuses_a_group_of_two_backends() -> None:
    plan = _planned(mlp())
    member = plan.groups[0][0]
    reshards = tuple(replace(r, backend="whale") if r == member else r for r in plan.reshards)
    with pytest.raises(PlanError, match="backend"):
        check(mlp(), replace(plan, reshards=reshards))


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("HorovodAllreduce", "hvd.DistributedGradientTape"),
        ("HorovodGroupedAllreduce", "hvd.DistributedOptimizer"),
        ("HorovodAllgather", "sparse gradients"),
        ("HorovodBroadcast", "hvd.broadcast_variables"),
    ],
)
def test_a_program_that_uses_horovod_is_refused(op: str, call: str) -> None:
    b = Builder()
    x = b.input("x", (8, 4))
    total = b.node(op, [x], [TensorType("float64", (8, 4))], "averaged")
    with pytest.raises(ProgramError) as caught:
        refuse_horovod(b.build([total]))
    text = str(caught.value)
    assert call in text
    assert f"averaged ({op})" in text
    assert "remove hvd.DistributedOptimizer" in text


def test_horovod_inside_a_function_is_found_and_its_rank_is_no_communication() -> None:
    inner = Builder("inner")
    x = inner.input("x", (8, 4))
    body = inner.build([inner.node("HorovodAllreduce", [x], [TensorType("float64", (8, 4))], "averaged")])
    outer = mlp()
    with pytest.raises(ProgramError, match="averaged"):
        refuse_horovod(replace(outer, functions={"inner": body}))
    b = Builder()
    rank = b.node("HorovodRank", [], [TensorType("int32", ())], "rank", stateful=True)
    refuse_horovod(b.build([rank]))
