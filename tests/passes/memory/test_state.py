"""Which variables a model computes with, and which only keep an optimizer's state."""

from __future__ import annotations

import pytest

from tests.programs import Builder
from whale.ir.ops import LOOKUPS
from whale.ir.values import DType, TensorType
from whale.passes.memory.footprint import variable_kinds
from whale.passes.memory.zero import only_state


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
    assert variable_kinds(program) == {"table": "parameters", "momentum": "slots", "average": "slots"}
