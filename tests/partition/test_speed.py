"""Placing reductions and localising do the same work for each node, however many there are."""

from __future__ import annotations

from functools import partial

from tests.lines import lines_of
from tests.programs import Builder, planned
from whale.ir.layout import shard
from whale.ir.program import Program
from whale.ir.values import DType, TensorType
from whale.partition.spmd import partition_for_rank
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import propagate

_ROWS, _WIDTH = 8, 4
_MANY, _MOST_GROWTH = 600, 1.05


def chain(layers: int) -> Program:
    """Products one after the other with their backward pass and SGD; types are given, so that it is quickly built."""
    b = Builder("chain")
    rows, weight = TensorType("float64", (_ROWS, _WIDTH)), TensorType("float64", (_WIDTH, _WIDTH))
    dtype = DType("float64")
    product = partial(b.node, "MatMul", T=dtype)
    values, handles, reads = [b.input("x", (_ROWS, _WIDTH))], [], []
    for i in range(layers):
        handles.append(b.variable(f"w{i}", (_WIDTH, _WIDTH)))
        reads.append(b.node("ReadVariableOp", (handles[i],), (weight,), f"read{i}", stateful=True, dtype=dtype))
        made = product((values[i], reads[i]), (rows,), transpose_a=False, transpose_b=False)
        values.append(b.node("Relu", (made,), (rows,), T=dtype))
    loss = b.reduce("Mean", b.op("Square", values[-1]), 0, 1)
    rate = b.const(0.1)
    slope, updates = b.op("Mul", values[-1], rate), []
    for i in reversed(range(layers)):
        slope = b.node("ReluGrad", (slope, values[i + 1]), (rows,), T=dtype)
        of_weight = product((values[i], slope), (weight,), transpose_a=True, transpose_b=False)
        step = b.node("Mul", (of_weight, rate), (weight,), T=dtype)
        updates.append(
            b.node("AssignSubVariableOp", (handles[i], step), (), f"update{i}", [f"read{i}"], True, dtype=dtype).node
        )
        slope = product((slope, reads[i]), (rows,), transpose_a=False, transpose_b=True)
    return b.build([loss], updates)


def lines_for_each(layers: int) -> tuple[float, float]:
    """Lines of placing reductions and of localising, for each layer."""
    program = chain(layers)
    layout = propagate(program, 2, {"x": shard(0, (4, 4))})[""]
    placing = lines_of(lambda: reduce_partial_sums(program, layout, 2))
    plan = planned(program, 4, 4)
    return placing / layers, lines_of(lambda: partition_for_rank(program, plan, 0, "comm", "chain")) / layers


def test_a_layer_costs_the_same_among_many_as_among_few() -> None:
    lines_for_each(2)  # rules and strategies that are asked for again are kept
    few, many = lines_for_each(20), lines_for_each(_MANY)
    assert many[0] < few[0] * _MOST_GROWTH, f"placing reductions: {few[0]:.0f} lines among 20, {many[0]:.0f} among many"
    assert many[1] < few[1] * _MOST_GROWTH, f"localising: {few[1]:.0f} lines among 20, {many[1]:.0f} among many"
