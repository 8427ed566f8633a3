"""Faults planted in rules: the prover, the suite of random programs and the checker of plans find them.

Each fault is one that a person makes: a mean divided by the wrong count, a contraction that forgets its sum, axes in
the wrong order. A plan says nothing of a local factor, so that one is for the prover and the suite alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.interpreter import InterpreterError
from tests.numpy_kernels import run_kernel
from tests.partition.test_training_programs import check_step
from tests.programs import Builder, layouts_of, plan_of
from tests.sharding_rules.prover import Case, prove
from tests.sharding_rules.sampling import F, K, case
from whale.errors import PlanError, WhaleError
from whale.ir.layout import shard
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.passes.verify.check import check
from whale.sharding_rules import find_rule, load_rules
from whale.sharding_rules.base import Local, OpView, Strategy, make_labels, read_constant, write_term
from whale.sharding_rules.registry import LineRule

PARTS = 2


def _without_the_factor(rule: LineRule) -> LineRule:
    """A mean whose parts are divided by the rank's own count."""

    def local(op: OpView, strategy: Strategy, coordinate: int) -> Local:
        right = rule.local(op, strategy, coordinate)  # type: ignore[misc]
        return right if right.divide_by is None else replace(right, divide_by=right.divide_by / op.parts)

    return replace(rule, local=local)


def _without_the_sum(rule: LineRule) -> LineRule:
    """A product that is taken for whole where its inner dimension is cut: nobody adds the parts up."""

    def line(op: OpView) -> str:
        """the transposes"""
        return rule.write_line(op).replace("+", "").replace("->", "-> =")

    return replace(rule, spec=line)


def _with_axes_the_wrong_way(rule: LineRule) -> LineRule:
    """A transpose that takes its permutation for the inverse one."""

    def line(op: OpView) -> str:
        """the permutation, inverted"""
        order = read_constant(op, 1)
        assert order is not None
        labels = make_labels("a", len(order))
        return f"{write_term(labels)}, . -> {write_term(labels[order.index(d)] for d in range(len(order)))}"

    return replace(rule, spec=line)


def _mean() -> Program:
    b = Builder("mean")
    return b.build([b.reduce("Mean", b.input("x", (8, 3)), 0)])


def _product() -> Program:
    b = Builder("product")
    x = b.input("x", (8, 3))
    return b.build([b.matmul(x, b.op("Tanh", x), a=True)])


def _transposed() -> Program:
    b = Builder("transposed")
    return b.build([b.op("Tanh", b.transpose(b.op("Tanh", b.input("x", (8, 8, 8))), 1, 2, 0))])


Fault = tuple[str, Callable[[LineRule], LineRule], Case, Callable[[], Program]]
FAULTS: dict[str, Fault] = {
    "wrong factor": ("Mean", _without_the_factor, case("Mean", F(8, 3), K([0])), _mean),
    "missing reshard": ("MatMul", _without_the_sum, case("MatMul", F(8, 6), F(6, 4)), _product),
    "wrong axis order": (
        "Transpose", _with_axes_the_wrong_way, case("Transpose", F(8, 8, 8), K([1, 2, 0])), _transposed
    ),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> Fault:
    found = FAULTS[fault]
    right = find_rule(found[0])
    assert right is not None
    monkeypatch.setitem(load_rules(), found[0], found[1](right))  # type: ignore[arg-type]
    return found


def evaluate(op: str, attrs: Mapping[str, Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(run_kernel(op, attrs, list(inputs)))


def _plan(program: Program) -> Plan:
    placed = {"x": shard(0, (4, 4))}
    return plan_of(program, layouts_of(program, PARTS, placed), PARTS, placed)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_prover_finds_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [f for f in prove(FAULTS[fault][2], evaluate, missing=False).findings if f.kind == "wrong"]
    _, _, one, _ = plant(monkeypatch, fault)
    assert [f for f in prove(one, evaluate, missing=False).findings if f.kind == "wrong"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_of_random_programs_finds_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault)
    with pytest.raises((AssertionError, InterpreterError, WhaleError, ValueError)):
        for seed in range(60):
            check_step(seed)


@pytest.mark.parametrize("fault", ["missing reshard", "wrong axis order"])
def test_the_checker_refuses_the_plan(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, _, _, program = FAULTS[fault]
    with monkeypatch.context() as planted:
        plant(planted, fault)
        plan = _plan(program())
    with pytest.raises(PlanError, match=f"the plan is not legal(.|\n)*\\({op}\\)"):
        check(program(), plan)
    check(program(), _plan(program()))
