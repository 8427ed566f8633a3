"""Which variables a model computes with, and which only keep an optimizer's state."""

from __future__ import annotations

import pytest

from tests.programs import Builder
from whale.ir.ops import LOOKUPS
from whale.ir.program import Program, Ref
from whale.ir.values import DType, TensorType
from whale.passes.analysis.uses import only_state, tensor_kinds, variable_kinds


@pytest.mark.parametrize("op", sorted(LOOKUPS))
def test_a_table_that_is_looked_up_is_no_state(op: str) -> None:
    """Its rows lead to nothing but updates, as an optimizer's state does; a momentum is what is never looked up."""
    b = Builder()
    table, momentum = b.variable("table", (5, 4)), b.variable("momentum", (5, 4))
    source = table if op.startswith("Resource") else b.read(table)
    index = b.ints(2, 3) if not op.endswith("Nd") else b.const([[2], [3]], "int32")
    operands = (source, index, b.const(0, "int32")) if op == "GatherV2" else (source, index)
    rows = b.node(op, operands, (TensorType("float64", (2, 4)),), "rows", stateful=True, Tindices=DType("int32"))
    average = b.variable("average", (2, 4))
    updates = [
        b.update("AssignVariableOp", average, b.op("Square", rows)),
        b.update("AssignVariableOp", momentum, b.op("Square", b.read(momentum))),
    ]
    program = b.build([], updates)
    assert {"table", "momentum"} & only_state(program) == {"momentum"}
    assert variable_kinds(program) == {
        "table": "parameters",
        "momentum": "optimizer state",
        "average": "optimizer state",
    }


def test_kinds_of_an_update_of_many_variables_are_found_without_going_from_each_result_to_each_operand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 60
    b = Builder()
    handles = [b.variable(f"w{i}", (3,)) for i in range(count)]
    gradients = [b.op("Tanh", b.input(f"x{i}", (3,))) for i in range(count)]
    many = b.node("WhaleUpdate", (*handles, *gradients), [TensorType("float64", (3,))] * count, stateful=True)
    later = [b.update("AssignVariableOp", h, Ref(many.node, i)) for i, h in enumerate(handles)]
    program, asked = b.build([], later), list[Ref]()
    kind_of = Program.find_type
    monkeypatch.setattr(Program, "find_type", lambda self, ref: (asked.append(ref), kind_of(self, ref))[1])
    kinds = tensor_kinds(program)
    assert {kinds[ref] for ref in (*gradients, Ref(many.node, count - 1))} == {"gradients"}
    assert len(asked) < 12 * count
