"""What XLA fuses: elementwise operations of compiled parts run inside the kernels that use them."""

from __future__ import annotations

import pytest

from cost_model.graph.fusion import fuse_work
from cost_model.kernels.op_work import Work, estimate_work
from tests.programs import Builder
from whale.ir.program import Program

ROWS, WIDTH = 64, 256
SIZE = 4.0 * ROWS * WIDTH


def _program(compiled: bool = True) -> Program:
    """A product, its activation, of which two chains go on: to a product, and to a sum."""
    b = Builder("compiled", "float32")
    x, weight = b.input("x", (ROWS, WIDTH)), b.input("w", (WIDTH, WIDTH))
    bent = b.op("Tanh", b.matmul(x, weight, name="product"), name="bent")
    less = b.op("Sub", b.op("AddV2", bent, bent, name="twice"), bent, name="less")
    last = b.matmul(less, weight, name="last")
    total = b.reduce("Sum", b.op("Square", less, name="whole"), 0, 1, name="total")
    return _mark(b.build([last, total]), compiled)


def _mark(program: Program, compiled: bool = True) -> Program:
    return program.replace_nodes(tuple(n.with_marks(compiled=compiled) for n in program.nodes))


def _work(program: Program) -> tuple[dict[str, Work], dict[str, Work]]:
    alone = [estimate_work(n, [program.find_type(r) for r in n.inputs]) for n in program.nodes]
    names = [n.name for n in program.nodes]
    return dict(zip(names, alone)), dict(zip(names, fuse_work(program, alone)))


def test_results_that_only_kernels_use_are_not_written() -> None:
    alone, fused = _work(_program())
    assert fused["bent"].written_bytes == SIZE  # expensive, and read by two
    assert fused["twice"].kernels == 0
    assert (fused["less"].read_bytes, fused["less"].written_bytes) == (SIZE, SIZE)  # a product reads it from memory
    assert fused["whole"].kernels == 0 and fused["total"].read_bytes == pytest.approx(SIZE, rel=1e-3)
    assert fused["product"] == alone["product"] and fused["last"] == alone["last"]


def test_only_what_is_compiled_is_fused() -> None:
    alone, fused = _work(_program(compiled=False))
    assert alone == fused


def test_what_many_kernels_use_is_written_where_that_moves_less() -> None:
    b = Builder("chain", "float32")
    total, *others = [b.input(f"x{i}", (ROWS, WIDTH)) for i in range(6)]
    sums = []
    for i, one in enumerate(others):
        total = b.op("AddV2", total, one, name=f"add{i}")
        sums.append(b.reduce("Sum", total, 0, 1, name=f"sum{i}"))
    program = _mark(b.build(sums))
    _, fused = _work(program)
    assert fused["add0"].kernels == 0  # two operands, read by two kernels
    assert any(fused[f"add{i}"].written_bytes == SIZE for i in range(1, 5))
    assert max(one.read_bytes for one in fused.values()) <= 4 * SIZE
