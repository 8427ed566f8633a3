"""Variables that an operation changes inside a function of its own."""

from __future__ import annotations

import pytest

from tests.programs import Builder, planned
from whale.errors import PlanError
from whale.ir.program import Program
from whale.ir.values import DType, Func, TensorType
from whale.passes.verify.hidden_updates import refuse_hidden_updates

VARIANT, HANDLE = TensorType("variant", ()), TensorType("resource", ())


def _dataset_loop(update: str, op: str = "ScanDataset") -> Program:
    """A loop over a dataset, as AutoGraph writes it: the body of the loop is the function of a dataset."""
    inner = Builder("scan_body")
    argument = inner.node("Placeholder", (), (HANDLE,), "argument", dtype=DType("resource"))
    inner.inputs.append("argument")
    inner.node(update, (argument, inner.const(1.0)), (), "inside", stateful=True, dtype=DType("float64"))
    b = Builder("step")
    handle = b.variable("w", ())
    data = b.node("Placeholder", (), (VARIANT,), "data", dtype=DType("variant"))
    b.inputs.append("data")
    scan = b.node(op, (data, handle), (VARIANT,), "scan", f=Func("scan_body"))
    total = b.node("ReduceDataset", (scan,), (TensorType("float64", ()),), "reduce", stateful=True, f=Func("other"))
    b.functions["scan_body"] = inner.build([], ["inside"])
    return b.build([total])


def test_an_update_in_the_function_of_a_dataset_is_refused() -> None:
    program = _dataset_loop("AssignSubVariableOp")
    with pytest.raises(PlanError, match=r"only the first rank(.|\n)*scan \(ScanDataset\)(.|\n)*AssignSubVariableOp"):
        refuse_hidden_updates(program, planned(program, 4, 4))


def test_the_advice_is_for_what_changes_the_variable() -> None:
    for op, advice in (("ScanDataset", "call the step once per batch"), ("MapDataset", "outside of the step")):
        program = _dataset_loop("AssignAddVariableOp", op)
        with pytest.raises(PlanError, match=rf"scan \({op}\)(.|\n)*next: .*{advice}"):
            refuse_hidden_updates(program, planned(program, 4, 4))


def test_one_rank_may_run_it() -> None:
    program = _dataset_loop("AssignSubVariableOp")
    refuse_hidden_updates(program, planned(program, 8))


def test_reading_is_no_update() -> None:
    program = _dataset_loop("ReadVariableOp")
    refuse_hidden_updates(program, planned(program, 4, 4))
