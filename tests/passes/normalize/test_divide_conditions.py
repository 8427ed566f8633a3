"""Checks that a condition that updates variables of several stages becomes one for each stage, and does the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.interpreter import run
from tests.programs import Builder
from whale.ir.ops import BRANCHES
from whale.ir.program import Program, Ref
from whale.ir.values import DType, Func, TensorType
from whale.ir.verify import verify
from whale.passes.analysis.stages import find_stages
from whale.passes.normalize.divide_conditions import divide_conditions

SHAPE = (3, 3)
SHAPES = {"first": SHAPE, "sum_first": SHAPE, "second": SHAPE, "sum_second": SHAPE, "count": ()}
STAGES = ({"first", "sum_first"}, {"second", "sum_second"})
WEIGHTS = ("first", "second")


class Body(Builder):
    """A function that takes the handles of all variables."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inputs += [f"of_{v}" for v in SHAPES]
        handle = TensorType("resource", ())
        self.of = {v: self.node("Placeholder", (), (handle,), f"of_{v}", dtype=DType("resource")) for v in SHAPES}

    def read_of(self, variable: str, controls: Sequence[str] = ()) -> Ref:
        t = TensorType(self.dtype, SHAPES[variable])
        return self.node(
            "ReadVariableOp", (self.of[variable],), (t,), controls=controls, stateful=True, dtype=DType(t.dtype)
        )

    def assign(self, op: str, variable: str, value: Ref, controls: Sequence[str] = ()) -> str:
        kind = DType(self.dtype)
        return self.node(op, (self.of[variable], value), (), controls=controls, stateful=True, dtype=kind).node


def conditional(
    b: Builder,
    name: str,
    predicate: Ref,
    then: Program,
    other: Program,
    handles: Sequence[Ref],
    controls: Sequence[str],
) -> Ref:
    """A node that runs one of two functions on the variables."""
    b.functions |= {then.name: then, other.name: other, **then.functions}
    types = [then.find_type(r) for r in then.outputs]
    functions = {"else_branch": Func(other.name), "then_branch": Func(then.name)}  # attributes are in no order
    return b.node("If", (predicate, *handles), types, name, controls, stateful=True, **functions)


def negates() -> Program:
    b = Body("negates")
    return b.build((), [b.assign("AssignVariableOp", v, b.op("Neg", b.read_of(v))) for v in WEIGHTS])


def updates(norm: bool, nested: bool) -> Program:
    """Adds what was summed to both weights, times the squared norm of both sums; counts, and returns the count."""
    b = Body("updates")
    sums = {v: b.read_of(f"sum_{v}") for v in WEIGHTS}
    cleared = [b.assign("AssignVariableOp", f"sum_{v}", b.const(np.zeros(SHAPE)), [sums[v].node]) for v in WEIGHTS]
    steps = sums
    if norm:
        squares = [b.reduce("Sum", b.op("Square", s), 0, 1) for s in sums.values()]
        total = b.op("AddV2", *squares)
        steps = {v: b.op("Mul", s, total) for v, s in sums.items()}
    done = [b.assign("AssignAddVariableOp", v, steps[v]) for v in WEIGHTS]
    # Only this update's waiting for the others says that they run.
    counted = b.assign("AssignAddVariableOp", "count", b.const(1.0), done)
    count = b.read_of("count", [counted])
    ends = [*cleared, counted]
    if nested:
        nothing = Body("nothing").build()
        conditional(b, "nested", b.op("Less", b.const(1.5), count), negates(), nothing, [*b.of.values()], done)
        ends.append("nested")
    return b.build([count], ends)


def program(norm: bool, nested: bool) -> Program:
    """Multiplies by two weights in two stages, sums slopes, and updates the weights under a condition."""
    b = Builder()
    x, every = b.input("x", (2, 3)), b.input("every", (), "bool")
    of = {v: b.variable(v, shape) for v, shape in SHAPES.items()}
    hidden, slopes = x, []
    for number, v in enumerate(WEIGHTS):
        b.scope = f"stage_{number}"
        before, hidden = hidden, b.matmul(hidden, b.read(of[v], name=f"read_{v}"))
        slopes.append(b.matmul(before, hidden, a=True))
    b.scope = ""
    sums = [b.update("AssignAddVariableOp", of[f"sum_{v}"], s) for v, s in zip(WEIGHTS, slopes)]
    other = Body("other")
    then, other_program = updates(norm, nested), other.build([other.op("Neg", other.read_of("count"))])
    found = conditional(b, "cond", every, then, other_program, [*of.values()], [*sums, *(f"read_{v}" for v in WEIGHTS)])
    after = [b.read(of[v], ["cond"]) for v in WEIGHTS]
    # Only its waiting for the condition says that this one is run, and that one before.
    last = b.update("AssignAddVariableOp", of["count"], b.const(10.0), controls=["cond"])
    return b.build([hidden, found, *after], [*sums, last])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_each_stage_updates_its_own_variables(norm: bool, nested: bool) -> None:
    whole = program(norm, nested)
    divided = divide_conditions(whole)
    verify(whole)
    verify(divided)
    parts = [n for n in divided.nodes if n.op in BRANCHES]
    assert len(parts) > 1
    for part in parts:
        taken = {r.node for r in part.inputs} & (STAGES[0] | STAGES[1])
        assert taken <= STAGES[0] or taken <= STAGES[1]
    stages = find_stages(divided)
    for number, own in enumerate(STAGES):
        for part in parts:
            if own & {r.node for r in part.inputs}:
                assert stages[part.name] == f"stage_{number}"
    values = np.random.default_rng(1)
    variables = {v: values.standard_normal(shape) for v, shape in SHAPES.items()}
    for every in (True, False):
        for count in (0.0, 5.0):
            feeds = {"x": values.standard_normal((2, 3)), "every": np.array(every)}
            held = {**variables, "count": np.array(count)}
            wanted = run([whole], feeds, held, 0)
            for seed in range(5):
                found = run([divided], feeds, held, seed)
                for a, b in zip(wanted.outputs[0], found.outputs[0], strict=True):
                    np.testing.assert_allclose(b, a, rtol=1e-12)
                for v in SHAPES:
                    np.testing.assert_allclose(found.ranks[0].variables[v], wanted.ranks[0].variables[v], rtol=1e-12)


def test_a_condition_of_one_stage_is_left_as_it_is() -> None:
    b = Builder()
    x, every = b.input("x", (2, 3)), b.input("every", (), "bool")
    of = {v: b.variable(v, shape) for v, shape in SHAPES.items()}
    b.scope = "stage_0"
    hidden = b.matmul(x, b.read(of["first"], name="read_first"))
    b.scope = "stage_1"
    hidden = b.matmul(hidden, b.read(of["second"], name="read_second"))
    b.scope = ""
    one = Body("one")
    then = one.build((), [one.assign("AssignVariableOp", "first", one.const(np.zeros(SHAPE)))])
    conditional(b, "cond", every, then, Body("nothing").build(), [*of.values()], ["read_first"])
    whole = b.build([hidden], ["cond"])
    assert [n.name for n in divide_conditions(whole).nodes] == [n.name for n in whole.nodes]
