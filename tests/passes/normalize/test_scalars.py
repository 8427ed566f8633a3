"""Scalars of updates: equal ones are one, as far as they are surely equal and of one scope."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.programs import Builder
from whale.ir.program import Program, Ref
from whale.ir.values import DType, Func, TensorType
from whale.passes.normalize.cse import share_scalars

pytestmark = pytest.mark.core
FLOAT = {"T": DType("float64")}


def _corrected(b: Builder, rate: Ref, step: Ref, beta: float) -> Ref:
    """What Adam multiplies a moment by: the rate, read anew, and a correction by the step's number."""
    power = b.op("Exp", b.op("Mul", b.read(step), b.const(beta), **FLOAT), **FLOAT)
    return b.op("Mul", b.read(rate), b.op("Sub", b.const(1.0), power, **FLOAT), **FLOAT)


def _steps(betas: tuple[float, ...], scopes: tuple[str, ...] = ()) -> Program:
    """A variable for each beta, updated by its gradient times a corrected rate."""
    b = Builder()
    rate, step = b.variable("rate", ()), b.variable("step", ())
    handles = [b.variable(f"w{i}", (3,)) for i, _ in enumerate(betas)]
    gradient = b.op("Tanh", b.input("x", (3,)), **FLOAT)
    effects = []
    for i, beta in enumerate(betas):
        b.scope = scopes[i] if scopes else ""
        by = b.op("Mul", gradient, _corrected(b, rate, step, beta), **FLOAT)
        effects.append(b.update("AssignSubVariableOp", handles[i], by))
    return b.build([], effects)


def _counts(program: Program) -> Counter[str]:
    return Counter(node.op for node in share_scalars(program).nodes)


def test_what_each_variable_computes_anew_is_computed_once() -> None:
    found = _counts(_steps((0.9, 0.9, 0.9)))
    once = ("Exp", "Sub")
    assert {op: found[op] for op in once} == dict.fromkeys(once, 1)
    # Of the variables' own, what takes tensors stays; of the rate and the step one reading each.
    assert (found["Mul"], found["ReadVariableOp"], found["Const"], found["AssignSubVariableOp"]) == (5, 2, 2, 3)


def test_other_values_and_other_scopes_stay_apart() -> None:
    assert _counts(_steps((0.9, 0.99)))["Exp"] == 2
    found = _counts(_steps((0.9, 0.9, 0.9), ("stage_0", "stage_1", "stage_1")))
    assert (found["Exp"], found["ReadVariableOp"]) == (2, 4)


def test_branches_that_choose_a_rate_stay_apart() -> None:
    b = Builder()
    rate, handles = b.variable("rate", ()), [b.variable(f"w{i}", (3,)) for i in range(2)]
    gradient = b.op("Tanh", b.input("x", (3,)), **FLOAT)
    effects = []
    branches = (Func("warm"), Func("cold"))
    for handle in handles:
        operands = (b.const(0, "int32"), b.read(rate))
        chosen = b.node("StatelessCase", operands, (TensorType("float64", ()),), branches=branches)
        effects.append(b.update("AssignSubVariableOp", handle, b.op("Mul", gradient, chosen, **FLOAT)))
    found = _counts(b.build([], effects))
    assert (found["StatelessCase"], found["ReadVariableOp"]) == (2, 1)


def test_a_reading_behind_a_write_is_another_value_and_who_waits_for_one_that_went_waits_for_the_first() -> None:
    b = Builder()
    step, *handles = b.variable("step", ()), *(b.variable(f"w{i}", (3,)) for i in range(3))
    gradient = b.op("Tanh", b.input("x", (3,)), **FLOAT)
    first, second = (b.read(step, name=name) for name in ("first", "second"))
    write = b.update("AssignAddVariableOp", step, b.const(1.0), controls=["second"])
    third = b.read(step, [write], name="third")
    updates = [
        b.update("AssignSubVariableOp", handle, b.op("Mul", gradient, scalar, **FLOAT))
        for handle, scalar in zip(handles, (first, second, third))
    ]
    program = share_scalars(b.build([], [*updates, write]))
    assert [n.name for n in program.nodes if n.op == "ReadVariableOp"] == ["first", "third"]
    assert program.by_name[write].controls == ("first",) and program.by_name["third"].controls == (write,)


def test_what_no_update_is_computed_of_stays_as_it_is() -> None:
    b = Builder()
    x = b.input("x", (3,))
    halves = [b.op("Mul", x, b.const(0.5), **FLOAT) for _ in range(2)]
    program = b.build(halves)
    assert share_scalars(program) is program
