"""Updates wait for exchanges: a rank has taken a step whole, or has changed nothing that it cannot put back."""

from __future__ import annotations

from tests.programs import Builder
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType
from whale.kernels.updates import list_early_writes, order_updates_last


def _step() -> Program:
    """Two weights, one gradient of which is exchanged; the exchange reads a count that the step has advanced."""
    b = Builder()
    w, v, count = (b.variable(name, (2,)) for name in ("w", "v", "count"))
    one = b.const([1.0, 1.0])
    advanced = b.update("AssignAddVariableOp", count, one, name="advance")
    scaled = b.op("Mul", b.read(w), b.read(count, controls=[advanced]))
    whole = b.node("WhaleAllReduce", [scaled], [TensorType("float64", (2,))], name="sum")
    total = whole if isinstance(whole, Ref) else Ref("sum")
    updates = [
        b.update("AssignSubVariableOp", w, total, name="update_w"),
        b.update("AssignSubVariableOp", v, one, name="update_v"),
    ]
    return b.build(effects=[advanced, *updates])


def test_updates_wait_for_all_exchanges_but_for_those_that_exchanges_wait_for() -> None:
    program = order_updates_last(_step())
    order = [node.name for node in program.nodes]
    waits = {node.name: node.controls for node in program.nodes}
    (gate,) = set(waits["update_v"]) & set(waits["update_w"])
    assert waits[gate] == ("sum",)
    assert gate not in waits["advance"]
    assert order.index("sum") < order.index(gate) < order.index("update_v")
    assert order.index("advance") < order.index("sum")


def test_what_is_written_before_an_exchange_is_known() -> None:
    assert list_early_writes(_step()) == ("count",)


def test_a_program_without_exchanges_stays_as_it_is() -> None:
    b = Builder()
    w = b.variable("w", (2,))
    program = b.build(effects=[b.update("AssignSubVariableOp", w, b.const([1.0, 1.0]))])
    assert order_updates_last(program) is program
    assert list_early_writes(program) == ()
