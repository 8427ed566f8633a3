"""Fingerprints: equal for equal programs, different after any change, and able to name where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.ir.strategies import programs
from tests.programs import body, mlp
from whale.ir.fingerprint import compute_fingerprint, list_node_digests
from whale.ir.program import Program, Ref, Variable
from whale.ir.text import format_program, parse_program
from whale.ir.values import DType, Func, Shape, Tensor, TensorType


def _example() -> Program:
    b, (x,) = body("inner", (2,))
    program = mlp()
    return program.replace_nodes(program.nodes, functions={"inner": b.build([b.op("Neg", x, name="negate")])})


def _edit(node: str, /, **changes: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        return program.replace_nodes(tuple(replace(n, **changes) if n.name == node else n for n in program.nodes))

    return change


def _attr(name: str, key: str, value: object) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        return _edit(name, attrs={**program.by_name[name].attrs, key: value})(program)

    return change


def _returns(program: Program) -> Program:
    inner = program.functions["inner"]
    return replace(program, functions={"inner": replace(inner, outputs=(Ref("inner_arg0"),))})


def _renamed(program: Program) -> Program:
    return replace(program, functions={"other": replace(program.functions["inner"], name="other")})


def _variable(program: Program) -> Program:
    other = Variable("w1", "w1:0", TensorType("float32", (4, 6)))
    return replace(program, variables=(other, *program.variables[1:]))


def _in_function(program: Program) -> Program:
    inner = _edit("negate", op="Abs")(program.functions["inner"])
    return replace(program, functions={"inner": inner})


CHANGES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "name": (_edit("relu", name="relu_1"), "relu_1 (Relu)"),
    "op": (_edit("relu", op="Relu6"), "relu (Relu6)"),
    "operand": (_edit("relu", inputs=(Ref("layer1"),)), "relu (Relu)"),
    "operand number": (_edit("relu", inputs=(Ref("bias1", 1),)), "relu (Relu)"),
    "operand order": (_edit("difference", inputs=(Ref("y"), Ref("bias2"))), "difference (Sub)"),
    "control edge": (_edit("relu", controls=("layer1",)), "relu (Relu)"),
    "attribute": (_attr("layer1", "transpose_a", True), "layer1 (MatMul)"),
    "attribute added": (_attr("layer1", "grad_a", False), "layer1 (MatMul)"),
    "attribute's type": (_attr("layer1", "transpose_a", 0), "layer1 (MatMul)"),
    "text for a dtype": (_attr("layer1", "T", "float64"), "layer1 (MatMul)"),
    "constant": (_attr("rate", "value", Tensor.from_numpy(np.array(0.2))), "rate (Const)"),
    "dtype": (_edit("relu", outputs=(TensorType("float32", (8, 6)),)), "relu (Relu)"),
    "shape": (_edit("relu", outputs=(TensorType("float64", (None, 6)),)), "relu (Relu)"),
    "scope": (_edit("relu", scope="stage_1"), "relu (Relu)"),
    "order of nodes": (lambda p: p.replace_nodes(p.nodes[1::-1] + p.nodes[2:]), "y (Placeholder)"),
    "node removed": (lambda p: p.replace_nodes(p.nodes[1:]), "y (Placeholder)"),
    "function": (_in_function, "inner/negate (Abs)"),
    "function's result": (_returns, "inner/the fetches inner_arg0:0"),
    "function's name": (_renamed, "other/inner_arg0 (Placeholder)"),
    "variable": (_variable, "variable w1:0"),
    "fetches": (lambda p: replace(p, outputs=(Ref("relu"),)), "the fetches relu:0"),
    "effects": (lambda p: replace(p, effects=p.effects[:-1]), "the fetches loss:0"),
    "inputs": (lambda p: replace(p, inputs=p.inputs[::-1]), "the fetches loss:0"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_changes_it_and_is_named(what: str) -> None:
    before = _example()
    change, named = CHANGES[what]
    after = change(before)
    assert compute_fingerprint(after) != compute_fingerprint(before)
    pairs = zip(list_node_digests(before), list_node_digests(after))
    first = next(mine for theirs, mine in pairs if theirs != mine)
    assert first[0] == named


@pytest.mark.parametrize(
    "pair",
    [
        (1, True), (1, 1.0), ("a", b"a"), ("float32", DType("float32")), ((), Shape(())), ((1, 2), Shape((1, 2))),
        (Shape(None), Shape(())),
        (("a", "b"), ("a,b",)), (Func("f"), "f"), (Func("f", {"a": 1}), Func("f")), (0.0, -0.0),
        (("a", ("b",)), ("a", "b")),
        (Func("f", {"a": "b", "c": "d"}), Func("f", {"a": "bc", "d": ""})), (Func("faint1"), Func("f", {"a": 1})),
        (Func("f", {"a": 1, "b": 2}), Func("f", {"aint1b": 2})),
        (Tensor("int32", (1,), b"\0\0\0\0"), Tensor("float32", (1,), b"\0\0\0\0")),
        (Tensor("int32", (1,), b"\0\0\0\0"), Tensor("int32", (), b"\0\0\0\0")),
    ],
    ids=lambda pair: f"{pair[0]!r} {pair[1]!r}",
)  # fmt: skip
def test_attribute_values_that_look_alike(pair: tuple[object, object]) -> None:
    prints = {compute_fingerprint(_attr("relu", "a", value)(_example())) for value in pair}
    assert len(prints) == 2


@settings(max_examples=60)
@given(programs)
def test_equal_programs_have_equal_fingerprints(program: Program) -> None:
    again = parse_program(format_program(program))
    assert compute_fingerprint(again) == compute_fingerprint(program)
    assert list_node_digests(again) == list_node_digests(program)
    shuffled = replace(program, functions=dict(reversed(list(program.functions.items()))))
    assert compute_fingerprint(shuffled) == compute_fingerprint(program)


def test_what_a_process_calls_its_python_functions_says_nothing() -> None:
    def calling(token: str) -> Program:
        return _edit("relu", op="EagerPyFunc", stateful=True, attrs={"token": token, "Tin": ()})(_example())

    assert compute_fingerprint(calling("pyfunc_7")) == compute_fingerprint(calling("pyfunc_8"))
    other = _edit("relu", attrs={"token": "pyfunc_7", "Tin": (DType("float32"),)})(calling("pyfunc_7"))
    assert compute_fingerprint(other) != compute_fingerprint(calling("pyfunc_7"))
