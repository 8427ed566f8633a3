"""Which exchanges devices carry out, and what stays with the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whale.ir.ops import EXCHANGES, ON_DEVICE
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Func, Shape, TensorType
from whale.passes.resharding.on_devices import (
    device_groups,
    find_in_stream,
    host_exchanges,
    mark_device_exchanges,
    on_devices,
    partners,
)

pytestmark = pytest.mark.core
X = TensorType("float32", (4,))
HANDLE = Node("comm", "WhaleCommunicator", outputs=(TensorType("resource", ()),))


def exchange(op: str, name: str = "moved", dtype: str = "float32", **attrs: object) -> Node:
    """An exchange of `x`; a Send has no result, a Recv no operand."""
    inputs = (Ref("comm"),) if op == "WhaleRecv" else (Ref("comm"), Ref("x"))
    outputs = () if op == "WhaleSend" else (TensorType(dtype, (4,)),)
    return Node(name, op, inputs, (), {"T": DType(dtype), "key": name, "ranks": (0, 1), **attrs}, outputs, "", True)


def program(*nodes: Node, functions: dict[str, Program] | None = None) -> Program:
    x = Node("x", "Placeholder", attrs={"dtype": DType("float32")}, outputs=(X,))
    return Program("step", (HANDLE, x, *nodes), (), (), effects=(nodes[-1].name,), functions=functions or {})


ALL = [
    exchange("WhaleAllReduce", N=1, reduction="sum"),
    exchange("WhaleAllGather", axis=0, sizes=(1, 3)),
    exchange("WhaleReduceScatter", axis=0, sizes=(1, 3), reduction="sum"),
    exchange("WhaleAllToAll", split_axis=0, split_sizes=(1, 3), concat_axis=1, concat_sizes=(1, 3)),
    exchange("WhaleBroadcast", N=1, root=0, shapes=(Shape((4,)),)),
    exchange("WhaleSend", peer=1),
    exchange("WhaleRecv", peer=1),
    exchange("WhaleAllGather", dtype="int64", axis=0, sizes=(1, 3)),
]


@pytest.mark.parametrize("node", ALL, ids=lambda n: f"{n.op} {n.attrs['T']}")
def test_devices_carry_out_what_moves_tensors(node: Node) -> None:
    before = program(node)
    after = on_devices(before, "c", 1)
    found = after.by_name["moved"]
    assert found.op == ON_DEVICE[node.op] and found.outputs == node.outputs
    assert found.inputs == node.inputs[1:], "it takes no handle"
    assert (found.attrs["communicator"], found.attrs["rank"], found.attrs["key"]) == ("c", 1, "moved")
    assert ("ranks" in found.attrs) == ("peer" not in node.attrs)
    assert "comm" not in after.by_name, "nobody asks for the handle any more"
    assert list(host_exchanges(before)) == []


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (
            exchange("WhaleAllReduce", dtype="int32", N=1, reduction="sum"),
            "int32: devices reduce floating-point types only",
        ),
        (exchange("WhaleAllGather", dtype="string", axis=0, sizes=(1, 3)), "no fixed size"),
        (exchange("WhaleAllGather", axis=0, sizes=()), "known only at run time"),
        (exchange("WhaleBroadcast", N=1, root=0, shapes=(Shape((None,)),)), "known only at run time"),
        (exchange("WhaleAllReduce", N=1, reduction="sum").with_marks(on_host=True), "in the host's memory"),
        (exchange("WhaleRouteIds"), "rows exchanged by their ids"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_host_keeps_the_others_and_says_why(node: Node, why: str) -> None:
    before = program(node)
    assert on_devices(before, "c", 1) == before
    (left,) = host_exchanges(before)
    assert left.node == node and why in left.why


def test_gathers_of_several_tensors_are_one_for_each() -> None:
    gather = exchange("WhaleAllGather", axis=0, sizes=(1, 3), N=2)
    both = replace(gather, inputs=(*gather.inputs, Ref("x")), outputs=gather.outputs * 2)
    reader = Node("sum", "AddV2", (Ref("moved", 0), Ref("moved", 1)), ("moved",), {"T": DType("float32")}, (X,))
    after = on_devices(program(both, reader), "c", 0)
    first, second = (node for node in after.nodes if node.op == "WhaleDeviceAllGather")
    assert first.inputs == second.inputs == (Ref("x"),) and first.outputs == second.outputs == gather.outputs
    assert first.attrs["key"] != second.attrs["key"] and "N" not in second.attrs
    assert after.by_name["sum"].inputs == (Ref(first.name), Ref(second.name))
    assert after.by_name["sum"].controls == (first.name, second.name)


def test_micro_batches_go_to_devices_and_loops_do_not() -> None:
    """No handle goes with a call that has no use for it: it would hold the micro-batch on the host."""
    given = replace(HANDLE, op="Placeholder")
    body = replace(program(exchange("WhaleAllReduce", N=1, reduction="sum")), inputs=("comm", "x"))
    body = body.replace_nodes((given, *body.nodes[1:]))
    passed = {"Tin": (DType("resource"), DType("float32"))}
    inner = Node("inner", "WhaleCall", (Ref("comm"), Ref("x")), (), {"f": Func("body"), **passed}, (X,), "", True)
    micro = replace(program(inner), inputs=("comm", "x"))
    micro = micro.replace_nodes((given, *micro.nodes[1:]))
    call = Node("call", "WhaleCall", (Ref("comm"), Ref("x")), (), {"f": Func("micro"), **passed}, (X,), "", True)
    loop = Node("loop", "While", (Ref("x"),), (), {"body": Func("loop_body")}, (X,), "", True)
    before = program(call, loop, functions={"micro": micro, "body": body, "loop_body": body})
    after = on_devices(before, "c", 0)
    for caller, node in ((after, "call"), (after.functions["micro"], "inner")):
        assert caller.by_name[node].inputs == (Ref("x"),) and caller.by_name[node].attrs["Tin"] == (DType("float32"),)
    assert after.functions["body"].inputs == after.functions["micro"].inputs == ("x",)
    assert {n.op for n in after.functions["body"].nodes} & (EXCHANGES | frozenset(ON_DEVICE.values())) == {
        "WhaleDeviceAllReduce"
    }
    assert after.functions["loop_body"] == body
    (left,) = host_exchanges(before)
    assert (left.graph, left.why) == ("loop_body", "in a loop or a branch")


def test_streams_wait_for_what_lies_between_products() -> None:
    """And the host for gradients, weights that are gathered, what micro-batches exchange, and the last of a step."""

    def node(name: str, op: str, *inputs: str, **attrs: object) -> Node:
        return Node(name, op, tuple(map(Ref, inputs)), (), attrs, (X,))

    def moved(name: str, op: str, of: str) -> Node:
        return replace(exchange(op, name, axis=0, sizes=(2, 2), reduction="sum"), inputs=(Ref("comm"), Ref(of)))

    handle = Node("w", "VarHandleOp", outputs=(TensorType("resource", ()),), stateful=True)
    forward = (
        node("read", "ReadVariableOp", "w"),
        moved("gathered", "WhaleAllGather", "read"),
        node("first", "MatMul", "x", "gathered"),
        moved("between", "WhaleAllReduce", "first"),
        node("second", "MatMul", "between", "gathered"),
        node("back", "MatMul", "second", "gathered"),
        moved("routed", "WhaleAllToAll", "back"),
        node("slope", "MatMul", "routed", "x"),
        moved("gradient", "WhaleAllReduce", "slope"),
        node("update", "AssignSubVariableOp", "w", "gradient"),
    )
    whole = program(handle, *forward)
    assert find_in_stream(whole) == {"between", "routed"}
    after = on_devices(whole, "c", 0)
    assert {n.name for n in after.nodes if n.attrs.get("in_stream")} == {"between", "routed"}
    # Without gradients to exchange the last one is waited for: else a step could end before an error of it.
    shorter = program(handle, *forward[:8])
    assert find_in_stream(shorter) == {"between"}
    # Products may be in functions; what these exchange is waited for.
    body = Program(
        "body", (node("x", "Placeholder"), node("product", "MatMul", "x", "x")), ("x",), (), (Ref("product"),)
    )
    call = node("call", "PartitionedCall", "between", f=Func("body"))
    called = program(handle, *forward[:4], call, moved("last", "WhaleAllReduce", "call"), functions={"body": body})
    assert find_in_stream(called) == {"between"}
    micro = Node("call", "WhaleCall", (Ref("comm"), Ref("x")), (), {"f": Func("micro")}, (X,), "", True)
    inner = replace(program(handle, *forward), inputs=("x",))
    batched = on_devices(program(micro, functions={"micro": inner}), "c", 0)
    assert not any(n.attrs.get("in_stream") for n in batched.functions["micro"].nodes)


def test_predictions_tell_apart_what_devices_exchange() -> None:
    reduced, kept = ALL[0], exchange("WhaleAllReduce", "kept", "int32", N=1, reduction="sum")
    before = program(reduced, kept)
    after = mark_device_exchanges(before, "nccl")
    assert after.by_name["moved"].marks.device_backend == "nccl" and not after.by_name["kept"].marks.device_backend
    assert mark_device_exchanges(before, "whale") is before


def test_groups_and_peers_of_a_device_are_counted() -> None:
    """A communicator for each group that reduces, gathers or broadcasts; what goes one by one has connections."""
    whole, pair = (exchange("WhaleAllReduce", f"sum{n}", N=1, ranks=ranks) for n, ranks in enumerate([(), (0, 2)]))
    again = exchange("WhaleReduceScatter", "again", axis=0, sizes=(2, 2), reduction="sum", ranks=(0, 2))
    on_host = exchange("WhaleAllReduce", "count", "int32", N=1, ranks=(0, 1))
    assert partners(program(whole, pair, again, on_host), 0, 4) == (2, 0)
    routed = exchange("WhaleAllToAll", "routed", ranks=(0, 1, 3))
    body = replace(program(exchange("WhaleSend", peer=1), exchange("WhaleRecv", "back", peer=2)), inputs=("comm", "x"))
    call = Node("call", "WhaleCall", (Ref("comm"), Ref("x")), (), {"f": Func("body")}, (X,), "", True)
    assert partners(program(routed, call, functions={"body": body}), 0, 4) == (0, 3)


def test_groups_are_connected_in_one_order_on_all_ranks() -> None:
    """All of them but that of all ranks, and those that send to one only."""
    call = Node("call", "WhaleCall", (Ref("x"),), (), {"f": Func("body"), "Tin": (DType("float32"),)}, (X,), "", True)
    kept = [exchange(op, f"{op} {ranks}", ranks=ranks, **attrs) for op, ranks, attrs in (
        ("WhaleAllReduce", (2, 0), {"N": 1, "reduction": "sum"}),
        ("WhaleAllReduce", (), {"N": 1, "reduction": "sum"}),
        ("WhaleAllGather", (0, 1), {"axis": 0, "sizes": (1, 3)}),
        ("WhaleAllReduce", (2, 0), {"N": 1, "reduction": "max"}),
        ("WhaleAllReduce", (0, 3), {"N": 1, "reduction": "sum", "T": DType("int64")}),
        ("WhaleSend", (0, 3), {"peer": 3}),
    )]  # fmt: skip
    named = [replace(node, name=f"n{i}") for i, node in enumerate(kept)]
    body = Program("body", (HANDLE, *program(*named[:1]).nodes[1:]), (), ())
    assert device_groups(on_devices(program(*named, call, functions={"body": body}), "c", 0)) == ((0, 1), (2, 0))
    assert device_groups(program(*named)) == (), "what the host carries out"
