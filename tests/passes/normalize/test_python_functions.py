"""Python functions of a step: all ranks that are processes call them, and go on with the first one's results."""

from __future__ import annotations

from tests.programs import Builder, body, planned
from whale.ir.layout import FIRST, B
from whale.ir.program import Program
from whale.ir.values import DType, TensorType
from whale.passes.normalize.side_effects import run_python_everywhere

PAIR, TEXT = TensorType("float64", (2,)), TensorType("string", ())


def call(b: Builder, *inputs: object, out: TensorType = PAIR, stateful: bool = True) -> object:
    return b.node("PyFunc", inputs, (out,), "python", stateful=stateful, token="pyfunc_1", Tout=(DType(out.dtype),))  # type: ignore[arg-type]


def looped() -> Program:
    inner, (state,) = body("turn", (2,))
    again, _ = body("again", (2,))
    b = Builder("step")
    cond = again.build([again.const(True, "bool")])
    turn = inner.build([call(inner, state)], ["python"])  # type: ignore[list-item]
    return b.build([b.loop(cond, turn, b.input("x", (2,)))])


def test_all_ranks_call_it_and_the_first_ones_result_counts() -> None:
    b = Builder("step")
    found = call(b, b.input("x", (4, 2)))
    program = run_python_everywhere(b.build([b.op("Neg", found, name="behind", T=DType("float64"))], ["python"]))  # type: ignore[arg-type]
    strategies = planned(program, 2, 2).strategies[""]
    assert (strategies["python"].inputs, strategies["python"].outputs) == ((B,), (B,))
    assert strategies["python/whale_of_first_0"].outputs == (FIRST,)
    assert program.by_name["behind"].inputs[0].node == "python/whale_of_first_0"
    assert strategies["behind"].inputs == (B,)


def test_loops_are_changed_too() -> None:
    turn = run_python_everywhere(looped()).functions["turn"]
    assert turn.outputs[0].node == "python/whale_of_first_0"
    assert turn.by_name["python"].marks.on_every_rank


def test_tables_and_queues_are_changed_on_every_rank() -> None:
    b = Builder("step")
    queue, x = b.input("queue", (), "resource"), b.input("x", (4, 2))
    put = b.node("QueueEnqueueV2", (queue, x), (), "put", stateful=True, Tcomponents=[DType("float32")])
    assert put is not None
    program = run_python_everywhere(b.build([b.op("Neg", x, name="behind", T=DType("float32"))], ["put"]))
    assert program.by_name["put"].marks.on_every_rank
    assert planned(program, 2, 2).strategies[""]["put"].inputs == (B, B)


def test_what_has_no_state_and_what_cannot_be_sent_stay_as_they_are() -> None:
    for out, stateful in ((TEXT, True), (PAIR, False)):
        b = Builder("step")
        program = b.build([call(b, b.input("x", (4, 2)), out=out, stateful=stateful)])  # type: ignore[list-item]
        assert run_python_everywhere(program) is program
