"""Operations that have no kernel for GPUs, and the bytes that are copied for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Func, TensorType
from whale.passes.resharding.on_devices import processor_lines

pytestmark = pytest.mark.core
X, IDS = TensorType("float32", (4, 8)), TensorType("int64", (32,))


def on_gpus(node: Node) -> bool:
    return node.op not in ("Unique", "Bincount", "Quantize")


def node(name: str, op: str, *inputs: str, kind: TensorType = X, **attrs: object) -> Node:
    return Node(name, op, tuple(Ref(one) for one in inputs), (), {"T": DType(kind.dtype), **attrs}, (kind,), "")


def program(*nodes: Node, functions: dict[str, Program] | None = None) -> Program:
    x = node("x", "Placeholder")
    return Program("step", (x, *nodes), ("x",), (Ref(nodes[-1].name),), functions=functions or {})


def test_what_stays_on_the_processor_is_told_with_what_is_copied() -> None:
    """Unique takes 128 bytes of the GPU; what it gives goes to Bincount only, which gives 256 back."""
    found = program(
        node("a", "Relu", "x"),
        node("ids", "Unique", "a", "a", kind=IDS),
        node("counts", "Bincount", "ids", kind=IDS),
        node("b", "Cast", "counts", kind=X),
        node("there", "Unique", "a", kind=IDS).with_marks(on_host=True),
        node("sent", "WhaleAllReduce", "a"),
    )
    assert processor_lines([found, found], on_gpus) == [
        "On the CPU, because TensorFlow has no GPU kernel; bytes copied between GPU and CPU in a step",
        "       512 B  2 Bincount of int64",
        "       256 B  2 Unique of int64",
    ]
    assert processor_lines([program(node("a", "Relu", "x"))], on_gpus) == ["On the GPU: all operations"]


def test_loops_and_calls_are_looked_into() -> None:
    body = replace(program(node("q", "Quantize", "x")), name="body")
    call = node("call", "WhaleCall", "x", f=Func("called"))
    loop = node("loop", "While", "call", body=Func("body"))
    found = program(call, loop, functions={"body": body, "called": replace(body, name="called")})
    _, first, second = processor_lines([found], on_gpus)
    assert sorted([first, second]) == [
        "       128 B  1 Quantize of float32",
        "       128 B  1 Quantize of float32, in a loop or branch: bytes of one iteration",
    ]
