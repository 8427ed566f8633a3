"""Gradients of what is broadcast over dimensions of size 1 are sums over these, too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.interpreter import run
from tests.partition.compare import feeds_of
from tests.programs import Builder
from whale.ir.program import Program, Ref
from whale.passes.normalize.folding.single_rows import sum_single_rows


def _slope(operand: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> Program:
    """As TensorFlow's gradient of a broadcast from ``shape`` to ``operand``."""
    b = Builder()
    total = b.reduce("Sum", b.input("x", operand), *axes, keep=True, name="total")
    return b.build([b.op("Neg", b.op("Reshape", total, b.ints(*shape), name="slope"), name="read")])


@pytest.mark.parametrize(
    ("operand", "axes", "shape", "over"),
    [((1, 6), (), (6,), [0]), ((1, 5, 6), (1,), (6,), [0, 1]), ((1, 1), (), (), [0, 1]), ((1, 4, 6), (), (4, 6), [0])],
)
def test_dimensions_of_size_1_are_summed(
    operand: Sequence[int], axes: Sequence[int], shape: Sequence[int], over: list[int]
) -> None:
    program = _slope(operand, axes, shape)
    found = sum_single_rows(program)
    slope = found.by_name["slope"]
    assert (slope.op, slope.inputs[0], slope.attrs["keep_dims"]) == ("Sum", Ref("x"), False)
    assert found.by_name[slope.inputs[1].node].attrs["value"].numpy().tolist() == over
    assert "total" not in found.by_name
    inputs, variables = feeds_of(program)
    before, after = (run([one], inputs, variables).outputs[0][0] for one in (program, found))
    assert before.shape == after.shape and (before == after).all()


@pytest.mark.parametrize(
    ("operand", "axes", "shape"), [((2, 6), (), (12,)), ((4, 6), (0,), (1, 6)), ((6, 1), (), (6,))]
)
def test_other_reshapes_stay(operand: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> None:
    program = _slope(operand, axes, shape)
    assert sum_single_rows(program) is program


def test_a_sum_that_others_read_stays() -> None:
    program = _slope((1, 6), (), (6,))
    program = program.replace_nodes(program.nodes, outputs=(*program.outputs, Ref("total")))
    assert sum_single_rows(program) is program
