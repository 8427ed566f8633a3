"""What of a rank's program becomes one operation on elements, and what must not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.programs import Builder, body
from whale.ir.program import COMPILED, Node, Program, Ref
from whale.ir.values import Func, TensorType
from whale.kernels.elementwise import ELEMENTWISE, fuse_elementwise
from whale.passes.elementwise.code import find_broadcast_kind

pytestmark = pytest.mark.core
SHAPE = (4, 64)


def fused(nodes: Iterable[Node]) -> list[tuple[str, ...]]:
    """The programs of the operations."""
    return [node.attrs["program"] for node in nodes if node.op == ELEMENTWISE]


@pytest.mark.parametrize(
    ("given", "whole", "kind"),
    [
        ((4, 64), (4, 64), "v"),
        ((), (4, 64), "s"),
        ((1, 1, 1), (4, 64), "s"),
        ((64,), (4, 64), "r"),
        ((1, 64), (4, 64), "r"),
        ((3, 64), (2, 3, 64), "r"),
        ((4, 1), (4, 64), "c"),
        ((2, 1, 1), (2, 3, 64), "c"),
        ((1, 3, 1), (1, 3, 64), "c"),
        ((4, 1), (4, 8), ""),  # too short a run
        ((2, 1, 64), (2, 3, 64), ""),
        ((1, 3, 1), (2, 3, 64), ""),
        ((1, 1, 4, 64), (4, 64), ""),  # more dimensions than the result
    ],
)
def test_operands_are_repeated_as_rows_or_columns(given: tuple[int, ...], whole: tuple[int, ...], kind: str) -> None:
    assert find_broadcast_kind(TensorType("float64", given), TensorType("float64", whole)) == kind


def test_arithmetic_before_and_after_a_reduction_is_two_operations() -> None:
    b = Builder()
    x, y = b.input("x", (32, 64)), b.input("y", (32, 64))
    product = b.op("Mul", b.op("Neg", x), y)
    mean = b.reduce("Mean", product, 0)
    centred = b.op("Sub", product, mean)
    # Only the second one reads this, so the first one does not keep it.
    scaled = b.op("Mul", x, b.const(3.0))
    program = fuse_elementwise(b.build([b.op("AddV2", b.op("Square", centred), scaled)]))
    assert fused(program.nodes) == [
        ("Neg t0 v0", "Mul y0 t0 v1", "Mean z0 y0"),
        ("Sub t0 v0 r0", "Mul t1 v1 s0", "Square t0 t0", "Add y0 t0 t1"),
    ]


def test_nothing_waits_for_an_exchange_that_did_not_before() -> None:
    """Another rank may need ``sent`` to send what is received."""
    b = Builder()
    x = b.input("x", SHAPE)
    first = b.op("Neg", b.op("Square", x))
    sent = b.node("WhaleSend", [first], [], name="send", stateful=True)
    received = b.node("WhaleRecv", [], [TensorType("float64", SHAPE)], name="receive", stateful=True)
    program = fuse_elementwise(b.build([b.op("Abs", b.op("AddV2", first, received))], [sent.node]))
    assert fused(program.nodes) == [("Square t0 v0", "Neg y0 t0"), ("Add t0 v0 v1", "Abs y0 t0")]
    ahead = {name for name, _ in program.by_name["send"].inputs}
    assert all(ref.node != "receive" for name in ahead for ref in program.by_name[name].inputs)


def test_who_waits_for_arithmetic_waits_for_its_operation() -> None:
    b = Builder()
    x = b.input("x", SHAPE)
    negative = b.op("Neg", x, name="negative")
    root = b.op("Abs", b.op("Square", negative), name="root")
    late = b.op("Tanh", x, controls=["negative"])
    program = fuse_elementwise(b.build([root, late]))
    (operation,) = [node for node in program.nodes if node.op == ELEMENTWISE]
    assert program.by_name[late.node].controls == (operation.name,)
    assert program.outputs[0] == Ref(operation.name, 0)


def test_a_constant_does_not_wait() -> None:
    """TensorFlow's gradient of a squared difference has the constant 2 wait for what is multiplied by it."""
    b = Builder()
    x = b.input("x", SHAPE)
    slope = b.op("Neg", x, name="slope")
    two = b.const(2.0, name="two")
    b.nodes[-1] = Node("two", "Const", (), ("slope",), b.nodes[-1].attrs, b.nodes[-1].outputs)
    program = fuse_elementwise(b.build([b.op("Mul", two, slope)]))
    assert fused(program.nodes) == [("Neg t0 v0", "Mul y0 s0 t0")]
    assert program.by_name["two"].controls == ()


def test_more_operands_than_an_operation_can_name_make_several() -> None:
    b = Builder()
    total = b.input("x", SHAPE)
    for i in range(150):
        total = b.op("AddV2", total, b.input(f"x{i}", SHAPE))
    program = fuse_elementwise(b.build([total]))
    assert [len(lines) for lines in fused(program.nodes)] == [63, 63, 24]
    assert not [node for node in program.nodes if node.op == "Add"]


def test_what_is_computed_again_stays_apart_from_what_was_computed_first() -> None:
    b = Builder()
    x = b.input("x", SHAPE)
    first = b.op("Neg", b.op("Square", x))
    again = [b.op("Square", first)]
    again.append(b.op("Neg", again[0]))
    built = b.build([first, again[1]])
    names = {ref.node for ref in again}
    built = built.replace_nodes(tuple(n.with_marks(recomputed=True) if n.name in names else n for n in built.nodes))
    program = fuse_elementwise(built)
    marks = [node.marks.recomputed for node in program.nodes if node.op == ELEMENTWISE]
    assert marks == [False, True]


def test_what_xla_compiles_and_tensorflows_own_fusions_are_left_alone() -> None:
    inner, (x,) = body("inner", SHAPE)
    twice = inner.build([inner.op("Neg", inner.op("Square", x))])
    b = Builder()
    b.functions["inner"] = twice
    y, w = b.input("y", SHAPE), b.input("w", (64, 8))
    compiled = b.node(
        "StatefulPartitionedCall", [y], [TensorType("float64", SHAPE)], f=Func("inner"), **{COMPILED: True}
    )
    product = b.op("BiasAdd", b.matmul(y, w), b.input("bias", (8,)))
    rectified = b.op("Relu", product)
    program = fuse_elementwise(b.build([compiled, b.op("Tanh", rectified)]))
    assert fused(program.nodes) == fused(program.functions["inner"].nodes) == []
    free: Program = fuse_elementwise(Builder.build(_without_mark(b), [compiled]))
    assert len(fused(free.functions["inner"].nodes)) == 1


def _without_mark(b: Builder) -> Builder:
    for i, node in enumerate(b.nodes):
        if COMPILED in node.attrs:
            attrs = {key: value for key, value in node.attrs.items() if key != COMPILED}
            b.nodes[i] = Node(node.name, node.op, node.inputs, (), attrs, node.outputs)
    return b


def test_tiles_that_repeat_in_two_ways_are_left_alone() -> None:
    b = Builder()
    x = b.input("x", (2, 64))
    tiled = b.op("Tile", x, b.ints(2, 1))
    assert not fused(fuse_elementwise(b.build([b.op("Neg", tiled)])).nodes)
    row = b.op("Tile", b.input("row", (1, 64)), b.ints(4, 1))
    program = fuse_elementwise(b.build([b.op("Sub", row, b.input("y", SHAPE))]))
    assert fused(program.nodes) == [("Sub y0 r0 v0",)]


def test_what_is_done_to_repeated_rows_is_done_once() -> None:
    b = Builder()
    x, row, other = b.input("x", SHAPE), b.input("row", (1, 64)), b.input("other", (1, 64))
    whole = [b.op("Tile", one, b.ints(4, 1)) for one in (row, other)]
    ratio = b.op("RealDiv", b.op("Mul", b.const(2.0), whole[0]), whole[1])
    program = fuse_elementwise(b.build([b.op("Sub", x, ratio)]))
    assert fused(program.nodes) == [("Mul t0 s0 v0", "Div y0 t0 v1"), ("Sub y0 v0 r0",)]
    assert not [node for node in program.nodes if node.op == "Tile"]


def test_rows_that_are_repeated_to_two_sizes_are_not_one() -> None:
    b = Builder()
    row = b.input("row", (1, 1, 64))
    some, all_ = (b.op("BroadcastTo", row, b.ints(*shape)) for shape in ((1, 4, 64), (3, 4, 64)))
    program = fuse_elementwise(b.build([b.op("Square", b.op("AddV2", some, all_))]))
    assert fused(program.nodes) == [("Add t0 r1 r0", "Square y0 t0")]


def test_a_repetition_that_waits_stays_where_it_is() -> None:
    b = Builder()
    row, x = b.input("row", (1, 64)), b.input("x", SHAPE)
    other = b.op("Tanh", x, name="other")
    whole = b.op("Tile", row, b.ints(4, 1), controls=["other"])
    program = fuse_elementwise(b.build([b.op("Sub", b.op("Mul", b.const(2.0), whole), x), other]))
    (operation,) = [node for node in program.nodes if node.op == ELEMENTWISE]
    assert operation.attrs["program"] == ("Mul t0 s0 r0", "Sub y0 t0 v0") and operation.controls == ("other",)


def test_a_bias_is_not_added_to_a_vector() -> None:
    b = Builder()
    whole = b.op("BroadcastTo", b.input("one", (1,)), b.ints(5, 1))
    program = fuse_elementwise(b.build([b.op("BiasAdd", whole, b.input("bias", (1,)), data_format="NHWC")]))
    assert all(len(program.find_type(n.inputs[0]).shape or ()) == 2 for n in program.nodes if n.op == "BiasAdd")
