"""FLOPs, bytes and kernels of nodes: every type of the inventory has a formula, and formulas fit hand counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cost_model.kernels.op_work import Work, estimate_work, is_covered, iterate_work
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Func, TensorType

INVENTORY = Path(__file__).resolve().parents[1] / "sharding_rules" / "op_inventory.csv"


def f32(*shape: int) -> TensorType:
    return TensorType("float32", shape)


def node(op: str, *outputs: TensorType, **attrs) -> Node:
    return Node("n", op, outputs=outputs, attrs=attrs)


def test_every_type_that_programs_contain_has_a_formula() -> None:
    with INVENTORY.open(newline="") as file:
        types = [row["op"] for row in csv.DictReader(file)]
    assert len(types) > 150
    assert [op for op in types if not is_covered(op)] == []


HANDLE = TensorType("resource", ())


@pytest.mark.parametrize(
    ("what", "inputs", "expected"),
    [
        (
            node("MatMul", f32(8, 32)),
            [f32(8, 16), f32(16, 32)],
            Work(2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32), 4 * 8 * 32, 1),
        ),
        (
            node("BatchMatMulV2", f32(3, 4, 6)),
            [f32(3, 4, 5), f32(3, 5, 6)],
            Work(2 * 3 * 4 * 5 * 6, 4 * (60 + 90), 4 * 72, 1),
        ),
        (
            node("MatMul", f32(8, 32), transpose_a=True),
            [f32(16, 8), f32(16, 32)],
            Work(2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32), 4 * 8 * 32, 1),
        ),
        (
            node("BatchMatMulV2", f32(3, 4, 6), adj_x=True),
            [f32(3, 5, 4), f32(3, 5, 6)],
            Work(2 * 3 * 4 * 5 * 6, 4 * (60 + 90), 4 * 72, 1),
        ),
        (
            node("Einsum", f32(2, 3, 5), equation="abc,cd->abd"),
            [f32(2, 3, 4), f32(4, 5)],
            Work(2 * 2 * 3 * 4 * 5, 4 * (24 + 20), 4 * 30, 1),
        ),
        (
            node("Conv2D", f32(2, 8, 8, 16)),
            [f32(2, 8, 8, 4), f32(3, 3, 4, 16)],
            Work(2 * 2 * 8 * 8 * 16 * 3 * 3 * 4, 4 * (512 + 576), 4 * 2048, 1),
        ),
        (
            node("Conv2DBackpropInput", f32(2, 8, 8, 4)),
            [TensorType("int32", (4,)), f32(3, 3, 4, 16), f32(2, 8, 8, 16)],
            Work(2 * 2 * 8 * 8 * 16 * 3 * 3 * 4, 4 * (576 + 2048), 4 * 512, 1),
        ),
        (node("AddV2", f32(4, 5)), [f32(4, 5), f32(5)], Work(20, 4 * 25, 80, 1)),
        (node("Tanh", f32(10)), [f32(10)], Work(200, 40, 40, 1)),
        (node("Sum", f32(4)), [f32(4, 5), TensorType("int32", (1,))], Work(20, 80, 16, 1)),
        (node("AddN", f32(10)), [f32(10)] * 3, Work(20, 120, 40, 1)),
        (node("Reshape", f32(20)), [f32(4, 5), TensorType("int32", (1,))], Work()),
        (node("ReadVariableOp", f32(20)), [HANDLE], Work()),
        (node("Transpose", f32(5, 4)), [f32(4, 5), TensorType("int32", (2,))], Work(0, 88, 80, 1)),
        # Three rows of a table of a million are three rows.
        (node("ResourceGather", f32(3, 8)), [HANDLE, TensorType("int64", (3,))], Work(0, 96, 96, 1)),
        (node("ResourceGatherNd", f32(3, 8)), [HANDLE, TensorType("int64", (3, 1))], Work(0, 96, 96, 1)),
        (node("EnsureShape", f32(20)), [f32(20)], Work()),
        (node("WhaleHold", f32(20)), [f32(20)], Work()),
        (node("StatelessCase", f32(20)), [TensorType("int32", ()), f32(20)], Work()),
        (node("Slice", f32(2)), [f32(1000), TensorType("int32", (1,))], Work(0, 8, 8, 1)),
        (node("AssignVariableOp"), [HANDLE, f32(10)], Work(0, 40, 40, 1)),
        (node("AssignAddVariableOp"), [HANDLE, f32(10)], Work(10, 80, 40, 1)),
        # Adam reads gradient, variable and two moments and writes the last three.
        (node("ResourceApplyAdam"), [HANDLE] * 3 + [f32()] * 6 + [f32(10)], Work(120, 160, 120, 1)),
        (
            node("ResourceSparseApplyMomentum"),
            [HANDLE, HANDLE, f32(), f32(3, 8), TensorType("int32", (3,)), f32()],
            Work(96, 3 * 96 + 12, 2 * 96, 1),
        ),
        (node("MaxPool", f32(1, 4, 4, 2), ksize=(1, 2, 2, 1)), [f32(1, 8, 8, 2)], Work(128, 512, 128, 1)),
        (
            node("AvgPoolGrad", f32(1, 8, 8, 2), ksize=(1, 2, 2, 1)),
            [TensorType("int32", (4,)), f32(1, 4, 4, 2)],
            Work(128, 128, 512, 1),
        ),
        (node("RandomUniform", f32(10)), [TensorType("int32", (1,))], Work(250, 0, 40, 1)),
        (node("StatelessTruncatedNormalV2", f32(10)), [TensorType("int32", (1,))], Work(650, 0, 40, 1)),
        (node("StatelessShuffle", f32(10)), [f32(10)], Work(10, 40, 40, 1)),
        (node("NotAnOpOfTheInventory", f32(10)), [f32(10)], Work(10, 40, 40, 1)),
    ],
    ids=lambda value: value.op if isinstance(value, Node) else "",
)
def test_hand_counts(what: Node, inputs: list[TensorType], expected: Work) -> None:
    assert estimate_work(what, inputs) == expected


def test_a_recurrent_kernel_multiplies_every_weight_with_every_row_of_every_step() -> None:
    weights = 4 * (16 + 32) * 32
    inputs = [f32(7, 5, 16), f32(1, 5, 32), f32(1, 5, 32), f32(weights)]
    assert estimate_work(node("CudnnRNNV3", f32(7, 5, 32)), inputs).flops == 2 * weights * 7 * 5
    assert estimate_work(node("CudnnRNNBackpropV3", f32(7, 5, 16)), inputs).flops == 4 * weights * 7 * 5


def test_bodies_are_counted_where_they_are_called_and_as_often_as_they_run() -> None:
    x = Node("x", "Placeholder", outputs=(f32(4, 4),))
    product = Node("y", "MatMul", (Ref("x"), Ref("x")), outputs=(f32(4, 4),))
    body = Program("body", (x, product), inputs=("x",), outputs=(Ref("y"),))
    loop = Node(
        "loop", "StatelessWhile", (Ref("x"),), outputs=(f32(4, 4),), attrs={"body": Func("body"), "cond": Func("cond")}
    )
    call = Node("call", "PartitionedCall", (Ref("loop"),), outputs=(f32(4, 4),), attrs={"f": Func("body")})
    program = Program("p", (x, loop, call), inputs=("x",), outputs=(Ref("call"),), functions={"body": body})
    flops = [one.flops for _, one in iterate_work(program, trips=10)]
    assert sum(flops) == (10 + 1) * 2 * 4**3
