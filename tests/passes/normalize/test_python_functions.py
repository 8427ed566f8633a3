"""Python functions, tables and queues of a step: all ranks that are processes use theirs, of threads the first one."""

from __future__ import annotations

from dataclasses import replace

from tests.programs import Builder, body, planned
from whale.ir.layout import FIRST, B
from whale.ir.program import Program
from whale.ir.values import DType, Func, TensorType
from whale.passes.normalize.side_effects import run_python_everywhere, use_shared_objects_once

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


def test_threads_use_shared_objects_on_the_first_rank_also_in_branches() -> None:
    b = Builder("step")
    queue, weight = b.input("queue", (), "resource"), b.variable("w", ())
    inner = Builder("then")
    one, own = inner.input("one", (), "resource"), inner.input("own", (), "resource")
    got = inner.node("QueueDequeueV2", [one], (PAIR,), "got", stateful=True, component_types=[DType("float64")])
    read = inner.node("ReadVariableOp", [own], (TensorType("float32", ()),), "read", stateful=True)
    other = Builder("else")
    other.input("two", (), "resource")
    zero = other.node("ReadVariableOp", [other.input("mine", (), "resource")], (TensorType("float32", ()),), "zero")
    branch = b.branch(
        b.const(True, "bool"),
        inner.build([got, read], ["got", "read"]),  # type: ignore[list-item]
        other.build([other.const([0.0, 0.0]), zero]),  # type: ignore[list-item]
        queue,
        weight,
    )
    program = use_shared_objects_once(b.build([branch]))
    then = program.functions["then"]
    assert [then.by_name[name].marks.on_first_rank for name in ("got", "read")] == [True, False]
    strategies = planned(program, 2, 2).strategies["then"]
    assert strategies["got"].once
    assert strategies["got"].outputs == (FIRST,)
    assert strategies["read"].outputs == (B,)


def test_tables_of_a_sessions_graph_are_on_the_first_rank_only() -> None:
    b = Builder("step")
    queue = b.node("FIFOQueueV2", (), (TensorType("resource", ()),), "queue", stateful=True)
    put = b.node("QueueEnqueueV2", (queue, b.input("x", (4, 2))), (), "put", stateful=True)
    assert put is not None
    assert not run_python_everywhere(b.build([], ["put"])).by_name["put"].marks.on_every_rank


def test_datasets_whose_functions_change_tables_are_read_on_every_rank() -> None:
    variant, func = TensorType("variant", ()), Builder("mapped")
    func.node("LookupTableInsertV2", [func.input("table", (), "resource")], (), "insert", stateful=True)
    b = Builder("step")
    data = b.node("RangeDataset", (), (variant,), "data")
    mapped = b.node("MapDataset", (data, b.input("table", (), "resource")), (variant,), "all", f=Func("mapped"))
    one = b.node("DatasetToSingleElement", [mapped], (PAIR,), "one", stateful=True)
    program = replace(b.build([one], ["one"]), functions={"mapped": func.build([], ["insert"])})  # type: ignore[list-item]
    program = run_python_everywhere(program)
    assert [program.by_name[name].marks.on_every_rank for name in ("data", "all", "one")] == [True, True, True]


def test_iterators_of_the_script_are_read_on_every_rank_and_those_of_a_session_on_the_first() -> None:
    for handle, everywhere in (("Placeholder", True), ("IteratorV2", False)):
        b = Builder("step")
        given = b.input("it", (), "resource") if everywhere else b.node(handle, (), (TensorType("resource", ()),), "it")
        inner = Builder("then")
        read = inner.node("IteratorGetNext", [inner.input("one", (), "resource")], (PAIR,), "next", stateful=True)
        other = Builder("else")
        other.input("two", (), "resource")
        branch = b.branch(
            b.const(True, "bool"), inner.build([read], ["next"]), other.build([other.const([0.0, 0.0])]), given
        )
        program = run_python_everywhere(b.build([branch]))
        assert program.functions["then"].by_name["next"].marks.on_every_rank == everywhere
        assert (program.functions["then"].outputs[0].node == "next/whale_of_first_0") == everywhere


def test_datasets_of_the_script_are_read_on_every_rank_and_those_of_the_step_on_the_first() -> None:
    variant = TensorType("variant", ())
    for given in (True, False):
        b = Builder("step")
        data = b.input("data", (), "variant") if given else b.node("RangeDataset", (), (variant,), "data")
        taken = b.node("TakeDataset", (data, b.const(3, "int64")), (variant,), "taken")
        one = b.node("DatasetToSingleElement", [taken], (PAIR,), "one", stateful=True)
        program = run_python_everywhere(b.build([one], ["one"]))
        assert [program.by_name[name].marks.on_every_rank for name in ("taken", "one")] == [given, given]
        assert program.outputs[0].node == ("one/whale_of_first_0" if given else "one")


def test_what_has_no_state_and_what_cannot_be_sent_stay_as_they_are() -> None:
    for out, stateful in ((TEXT, True), (PAIR, False)):
        b = Builder("step")
        program = b.build([call(b, b.input("x", (4, 2)), out=out, stateful=stateful)])  # type: ignore[list-item]
        assert run_python_everywhere(program) is program
