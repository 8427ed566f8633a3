"""Checks the order of reads and updates that a graph of TensorFlow 1 leaves open."""

from __future__ import annotations

from tests.programs import Builder
from whale.frontends.tf1.reads import read_first, read_last
from whale.ir.program import Program


def waits(program: Program, name: str) -> set[str]:
    return {*program.by_name[name].controls}


def test_what_is_computed_from_a_step_is_of_the_step_before_it_is_counted() -> None:
    """Hooks fetch the step plus zero, and decide by it on every rank."""
    b = Builder()
    step = b.variable("step", ())
    b.update("AssignAddVariableOp", step, b.const(1.0), name="count")
    seen = b.op("AddV2", b.read(step, name="seen"), b.const(0.0))
    after = b.op("AddV2", b.read(step, ["count"], name="after"), b.const(0.0))
    program = read_first(read_last(b.build([seen, after], ["count"])))
    assert waits(program, "count") == {"seen"}
    assert waits(program, "after") == {"count"}
    names = [n.name for n in program.nodes]
    assert names.index("seen") < names.index("count")


def test_reads_that_are_before_an_update_already_get_no_edge() -> None:
    b = Builder()
    weight = b.variable("weight", (2,))
    loss = b.op("Square", b.read(weight, name="read"), name="loss")
    b.update("AssignSubVariableOp", weight, b.op("Mul", loss, loss), name="train")
    program = b.build([loss], ["train"])
    assert read_first(program) is program


def test_first_values_wait_for_no_read() -> None:
    b = Builder()
    weight = b.variable("weight", (2,))
    doubled = b.op("AddV2", b.read(weight, name="read"), b.read(weight, name="again"))
    b.update("AssignVariableOp", weight, b.const([1.0, 2.0]), name="initial")
    program = b.build([doubled], ["initial"])
    assert read_first(program) is program
    b.update("AssignVariableOp", weight, b.op("Neg", b.read(weight, name="old")), name="negate")
    changed = read_first(b.build([doubled], ["negate"]))
    assert waits(changed, "negate") == {"read", "again"}


def test_a_fetched_read_is_after_the_update() -> None:
    b = Builder()
    step = b.variable("step", ())
    fetched = b.read(step, name="fetched")
    b.update("AssignAddVariableOp", step, b.const(1.0), name="count")
    program = read_first(read_last(b.build([fetched], ["count"])))
    (ref,) = program.outputs
    assert waits(program, ref.node) == {"count"}
    assert not waits(program, "count")
