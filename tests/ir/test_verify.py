"""The verifier of programs: what is planted is named, with the pass and the op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.programs import Builder, mlp
from whale.errors import ProgramError
from whale.ir.emitter import Emitter
from whale.ir.layout import B, Partial
from whale.ir.plan import Reshard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Func, TensorType
from whale.ir.verify import verify


def step() -> Program:
    """A product, a branch, and an update of a variable by a sum over ranks."""
    b = Builder("step", "float32")
    x, w = b.input("x", (4, 8)), b.variable("w", (8, 2))
    product = b.matmul(x, b.read(w, name="read"), name="product")
    small = b.op("Tanh", product, name="small")
    then, other = one_more("then"), one_more("other")
    chosen = b.branch(b.const(True, "bool", name="which"), then, other, small, name="branch")
    shape = b.reshape(chosen, 8)
    program = b.build([shape], [])
    e = Emitter(0, 2, "ranks")
    e.nodes.update({n.name: n for n in program.nodes})
    t = TensorType("float32", (8, 2))
    e.const("gradient", np.zeros((8, 2), np.float32))
    summed = e.all_reduce("sum", [Ref("gradient")], [t], Reshard("", Ref("gradient"), Partial("sum"), B, "k", 0), "k")
    e.add("update", "AssignSubVariableOp", (w, summed), {"dtype": DType("float32")}, (), stateful=True)
    return program.replace_nodes(tuple(e.nodes.values()), effects=("update",))


def one_more(name: str) -> Program:
    b = Builder(name, "float32")
    return b.build([b.op("AddV2", b.input("a", (4, 2)), b.const(1.0))])


def changed(name: str, **changes: object) -> Callable[[Program], Program]:
    """Returns a function that changes fields of one node of a program."""
    return lambda p: p.replace_nodes(tuple(replace(n, **changes) if n.name == name else n for n in p.nodes))


def attribute(name: str, **attrs: object) -> Callable[[Program], Program]:
    return lambda p: changed(name, attrs={**p.by_name[name].attrs, **attrs})(p)


def second_sum(program: Program) -> Program:
    again = replace(program.by_name["sum"], name="sum_again")
    update = replace(program.by_name["update"], inputs=(Ref("w"), Ref("sum_again")))
    nodes = [n for n in program.nodes if n.name != "update"]
    return program.replace_nodes((*nodes, again, update))


def cyclic(program: Program) -> Program:
    first = changed("product", controls=("small",))(program)
    return first


def of_body(change: Callable[[Program], Program]) -> Callable[[Program], Program]:
    return lambda p: replace(p, functions={**p.functions, "then": change(p.functions["then"])})


BROKEN: dict[str, tuple[Callable[[Program], Program], str, str]] = {
    "duplicate name": (
        lambda p: p.replace_nodes((*p.nodes, p.by_name["small"])),
        "small (Tanh)",
        "the graph has an earlier node of this name",
    ),
    "dangling reference": (
        changed("small", inputs=(Ref("nowhere"),)),
        "small (Tanh)",
        "the node reads nowhere:0, and the graph has no such node",
    ),
    "dangling result": (changed("small", inputs=(Ref("product", 1),)), "small (Tanh)", "the node reads product:1"),
    "dangling control": (
        changed("small", controls=("nowhere",)),
        "small (Tanh)",
        "the node waits for nowhere, and the graph has no such node",
    ),
    "cyclic order": (cyclic, "product (MatMul)", "the node waits for small, and is part of a cycle: "),
    "wrong order": (
        lambda p: p.replace_nodes(tuple(reversed(p.nodes))),
        "update (AssignSubVariableOp)",
        "the node reads w:0, which comes after the node",
    ),
    "duplicate key": (second_sum, "sum_again (WhaleAllReduce)", "the node has the key k, which sum has"),
    "wrong type of an elementwise operation": (
        changed("small", outputs=(TensorType("float64", (4, 2)),)),
        "small (Tanh)",
        "operands, then results, of the types float32[4,2], float64[4,2]",
    ),
    "wrong shape of an elementwise operation": (
        changed("small", outputs=(TensorType("float32", (4, 3)),)),
        "small (Tanh)",
        "the node's result is float32[4,3]",
    ),
    "wrong type of an attribute": (
        attribute("small", T=DType("half")),
        "small (Tanh)",
        "operands, then results, of the types float32[4,2]",
    ),
    "a product of shapes that do not fit": (
        changed("read", outputs=(TensorType("float32", (8, 3)),)),
        "read (ReadVariableOp)",
        "the node's result is float32[8,3]",
    ),
    "a product of unlike sides": (
        attribute("product", transpose_a=True),
        "product (MatMul)",
        "the node multiplies float32[4,8] by float32[8,2]",
    ),
    "a sum of another type": (
        changed("sum", outputs=(TensorType("float32", (8, 1)),)),
        "sum (WhaleAllReduce)",
        "the node makes float32[8,1] of float32[8,2]",
    ),
    "a value that does not fit its variable": (
        changed("update", inputs=(Ref("w"), Ref("small"))),
        "update (AssignSubVariableOp)",
        "the value that the node assigns is float32[4,2]",
    ),
    "a lost function": (lambda p: replace(p, functions={}), "branch (StatelessIf)", "the node calls the function then"),
    "a function of another type": (
        of_body(changed("a", outputs=(TensorType("float32", (4, 1)),))),
        "branch (StatelessIf)",
        "the function then takes float32[4,1]",
    ),
    "an error inside a function": (
        of_body(lambda p: p.replace_nodes(tuple(changed(p.nodes[-1].name, inputs=(Ref("b"), Ref("a")))(p).nodes))),
        "then/AddV2_2 (AddV2)",
        "the node reads b:0, and the graph has no such node",
    ),
    "an update that nothing keeps": (
        lambda p: replace(p, effects=()),
        "sum (WhaleAllReduce)",
        "the node has side effects, and no output or effect of the program waits for it",
    ),
    "an effect that is gone": (
        lambda p: replace(p, effects=("update", "print")),
        "step",
        "the graph lists the effect print",
    ),
    "an input twice": (lambda p: replace(p, inputs=("x", "x")), "step", "the graph lists the input x twice"),
    "a result that is gone": (lambda p: replace(p, outputs=(Ref("nowhere"),)), "step", "the graph returns nowhere:0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(case: str) -> None:
    change, op, given = BROKEN[case]
    with pytest.raises(ProgramError, match="a pass has broken the program") as raised:
        verify(change(step()), "planted")
    facts = raised.value.facts
    assert facts["pass"] == "planted" and facts["op"] == op
    assert str(facts["given"]).startswith(given) and facts["expected"]


def test_copies_of_a_function_have_its_keys_and_other_functions_have_not() -> None:
    def exchanging(name: str) -> Program:
        e = Emitter(0, 2, "ranks")
        t = TensorType("float32", (2,))
        source = e.add("a", "Placeholder", (), {}, (t,))
        out = e.comm_op(name, "WhaleAllReduce", (source,), t, {"key": "k", "reduction": "sum", "N": 1}, (t,))
        return Program("body", tuple(e.nodes.values()), ("a",), (), (out,))

    program = Program("step", (), functions={"one": exchanging("sum"), "copy": exchanging("sum")})
    verify(program)
    with pytest.raises(ProgramError) as raised:
        verify(replace(program, functions={"one": exchanging("sum"), "two": exchanging("other")}))
    assert raised.value.facts["op"] == "two/other (WhaleAllReduce)"
    assert raised.value.facts["given"] == "the node has the key k, which one/sum has too"


def test_good_programs_pass() -> None:
    verify(step())
    verify(mlp())


@pytest.mark.parametrize(
    ("part", "whole", "given"),
    [
        (TensorType("float32", (3, 2)), TensorType("float32", (8, 2)), None),
        (TensorType("float32", (5, 2)), TensorType("float32", (8, 2)), None),
        (
            TensorType("float32", (3, 2)),
            TensorType("float32", (7, 2)),
            "the node makes float32[7,2] of its part float32[3,2]",
        ),
        (
            TensorType("float32", (4, 2)),
            TensorType("float32", (8, 2)),
            "the node makes float32[8,2] of its part float32[4,2]",
        ),
        (
            TensorType("float64", (3, 2)),
            TensorType("float32", (8, 2)),
            "operands, then results, of the types float64[3,2], float32[8,2]",
        ),
    ],
)
def test_parts_that_are_gathered_make_the_whole(part: TensorType, whole: TensorType, given: str | None) -> None:
    e = Emitter(0, 2, "ranks")
    source = e.add("part", "Placeholder", (), {}, (part,))
    e.comm_op("whole", "WhaleAllGather", (source,), whole, {"key": "k", "axis": 0, "sizes": (3, 5)}, (whole,))
    program = Program("gathers", tuple(e.nodes.values()), ("part",), (), (Ref("whole"),))
    if given is None:
        verify(program)
        return
    with pytest.raises(ProgramError) as raised:
        verify(program)
    assert str(raised.value.facts["given"]).startswith(given) and raised.value.facts["op"] == "whole (WhaleAllGather)"


def test_unknown_sizes_fit_any() -> None:
    b = Builder("unknown", "float32")
    x = b.node("Placeholder", (), (TensorType("float32", None),), "x")
    y = b.node("Tanh", (x,), (TensorType("float32", (None, 3)),), "y")
    z = b.node("AddV2", (y, b.const(np.zeros((5, 1)))), (TensorType("float32", (5, 3)),), "z")
    program = Program("unknown", tuple(b.nodes), ("x",), (), (z,))
    verify(program)
    with pytest.raises(ProgramError, match="shapes that can be broadcast"):
        verify(changed("y", outputs=(TensorType("float32", (4, 3)),))(program))


def test_a_function_may_be_known_to_tensorflow_only() -> None:
    """Accepts a dataset's function, which is none of the program's."""
    node = Node("mapped", "MapDataset", (), (), {"f": Func("elsewhere")}, (TensorType("variant", ()),))
    verify(Program("reads", (node,), (), (), (Ref("mapped"),)))
