"""Checks that all ranks are assigned what functions of a dataset assign on the first rank."""

from __future__ import annotations

import pytest

from tests.programs import Builder, planned
from whale.ir.layout import FIRST, B
from whale.ir.program import Program
from whale.ir.values import DType, Func, TensorType
from whale.passes.normalize.side_effects import share_hidden_updates
from whale.passes.verify.hidden_updates import refuse_hidden_updates

VARIANT, HANDLE = TensorType("variant", ()), TensorType("resource", ())


def program_of(update: str, op: str = "MapDataset", in_reader: bool = False) -> Program:
    """A dataset of which a function, or its reader's, has two variables and may change the second one."""
    inner = Builder("function")
    arguments = [inner.node("Placeholder", (), (HANDLE,), name, dtype=DType("resource")) for name in ("one", "two")]
    inner.inputs += ["one", "two"]
    inner.node(update, (arguments[1], inner.const(1.0)), (), "inside", stateful=True, dtype=DType("float64"))
    b = Builder("step")
    kept, changed = b.variable("kept", ()), b.variable("changed", (2,))
    data = b.node("Placeholder", (), (VARIANT,), "data", dtype=DType("variant"))
    b.inputs.append("data")
    zero = b.update("AssignVariableOp", changed, b.const([0.0, 0.0]), name="zero")
    handles, function = (kept, changed), {"f": Func("function")}
    if not in_reader:
        data = b.node(op, (data, *handles), (VARIANT,), "map", **function)  # type: ignore[arg-type]
        handles, function = (), {"f": Func("other")}  # type: ignore[assignment]
    scalar = (TensorType("float64", ()),)
    total = b.node("ReduceDataset", (data, *handles), scalar, "reduce", [zero], stateful=True, **function)  # type: ignore[arg-type]
    read = b.read(changed, controls=["reduce"], name="after")
    b.functions["function"] = inner.build([], ["inside"])
    return b.build([total, read])


@pytest.mark.parametrize("in_reader", [False, True])
def test_the_first_rank_sends_what_its_copy_holds_behind_the_reader(in_reader: bool) -> None:
    program = share_hidden_updates(program_of("AssignAddVariableOp", in_reader=in_reader))
    read, first, assign = [node for node in program.nodes if "whale_shared" in node.name]
    assert {node.name.rpartition("/")[0] for node in (read, first, assign)} == {"reduce/whale_shared/changed"}
    assert "reduce" in read.controls
    # A rank that does not read the dataset assigns behind what came before it there.
    assert {"zero", "reduce"} <= {*assign.controls}
    assert assign.name in program.effects
    assert {"reduce", assign.name} == {*program.by_name["after"].controls}
    plan = planned(program, 1, 1)
    assert plan.strategies[""][first.name].outputs == (FIRST,)
    assert plan.strategies[""][assign.name].inputs == (B, B)
    assert plan.logical_bytes > 0
    refuse_hidden_updates(program, plan)


@pytest.mark.parametrize(("update", "op"), [("ReadVariableOp", "MapDataset"), ("AssignAddVariableOp", "ScanDataset")])
def test_what_is_read_only_and_what_is_a_loop_is_left_as_it_is(update: str, op: str) -> None:
    program = program_of(update, op)
    assert share_hidden_updates(program) is program
