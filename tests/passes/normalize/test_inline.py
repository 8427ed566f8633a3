"""Calls are replaced by bodies: values, types, order and names stay right."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

from tests.capture.roundtrip import rebuilt
from whale.capture.function import capture_function
from whale.errors import ProgramError
from whale.ir.ops import CALLS
from whale.ir.program import COMPILED, Node, Program, Ref, Variable
from whale.ir.values import DType, Func, TensorType
from whale.passes.normalize.inline import inline

pytestmark = pytest.mark.core
_F = TensorType("float32", ())


def _call(
    name: str, function: str, inputs: tuple[Ref, ...] = (), controls: tuple[str, ...] = (), **more: object
) -> Node:
    fields = {"outputs": (_F,), **more}
    return Node(name, "StatefulPartitionedCall", inputs, controls, {"f": Func(function)}, stateful=True, **fields)


def _arg(name: str) -> Node:
    return Node(name, "Placeholder", outputs=(_F,), attrs={"dtype": DType("float32")})


def _print(name: str, controls: tuple[str, ...] = ()) -> Node:
    return Node(name, "PrintV2", (), controls, stateful=True)


def _before(program: Program) -> nx.DiGraph:
    graph = nx.DiGraph()
    for node in program.nodes:
        graph.add_node(node.name)
        graph.add_edges_from((r.node, node.name) for r in node.inputs)
        graph.add_edges_from((c, node.name) for c in node.controls)
    assert nx.is_directed_acyclic_graph(graph)
    return nx.transitive_closure_dag(graph)


def _noisy_body() -> Program:
    """Prints, then returns the negated argument."""
    out = Node("out", "Neg", (Ref("x"),), outputs=(_F,))
    return Program("noisy", (_arg("x"), _print("say"), out), ("x",), outputs=(Ref("out"),), effects=("say",))


def test_order_around_a_call_stays() -> None:
    nodes = (
        _arg("a"),
        _print("first"),
        _print("second"),
        _call("call", "noisy", (Ref("a"),), ("first", "second")),
        _print("last", ("call",)),
    )
    effects = ("first", "second", "call", "last")
    program = Program("p", nodes, ("a",), (), (Ref("call"),), effects, {"noisy": _noisy_body()})
    flat = inline(program)
    assert flat.outputs == (Ref("call/out"),)
    assert flat.effects == ("first", "second", "call/say", "last")
    order = _before(flat)
    for before, after in (("first", "call/say"), ("second", "call/say"), ("call/say", "last"), ("first", "last")):
        assert order.has_edge(before, after), (before, after)
    assert not order.has_edge("first", "call/out"), "a pure node need not wait"
    assert not flat.functions


def test_a_pure_call_passes_order_on() -> None:
    body = Program("pure", (_arg("x"),), ("x",), outputs=(Ref("x"),))
    nodes = (_arg("a"), _print("first"), _call("call", "pure", (Ref("a"),), ("first",)), _print("last", ("call",)))
    program = Program("p", nodes, ("a",), (), (Ref("call"),), ("first", "last"), {"pure": body})
    flat = inline(program)
    assert flat.outputs == (Ref("a"),)
    assert _before(flat).has_edge("first", "last")
    assert all("a" not in n.controls for n in flat.nodes), "nothing waits for an argument"


def _handle(name: str) -> Node:
    return Node(name, "Placeholder", outputs=(TensorType("resource", ()),))


def _read(name: str, handle: str, controls: tuple[str, ...] = ()) -> Node:
    return Node(name, "ReadVariableOp", (Ref(handle),), controls, outputs=(_F,), stateful=True)


def _write(name: str, handle: str, value: str, controls: tuple[str, ...] = ()) -> Node:
    return Node(name, "AssignVariableOp", (Ref(handle), Ref(value)), controls, stateful=True)


def _updating(*more: Node) -> Program:
    """Reads a rate, and subtracts it from a weight."""
    nodes = (
        _handle("w"), _handle("rate"), _read("old", "w"), _read("step", "rate"),
        Node("new", "Sub", (Ref("old"), Ref("step")), outputs=(_F,)), _write("write", "w", "new", ("old",)), *more,
    )  # fmt: skip
    effects = ("write", *[n.name for n in more])
    return Program("f", nodes, ("w", "rate"), outputs=(), effects=effects)


def _around_updates(body: Program) -> nx.DiGraph:
    """Two weights are read, and updated by calls that share a rate, which is written then; one weight is read again."""
    calls = [
        Node(
            f"call_{w}",
            "StatefulPartitionedCall",
            (Ref(w), Ref("rate")),
            (f"read_{w}",),
            {"f": Func("f")},
            (),
            "",
            True,
        )
        for w in "ab"
    ]
    nodes = (
        _arg("x"), _handle("a"), _handle("b"), _handle("rate"), _read("read_a", "a"), _read("read_b", "b"), *calls,
        _write("decay", "rate", "x", ("call_a", "call_b")), _read("again", "a", ("call_a",)),
    )  # fmt: skip
    variables = tuple(Variable(name, name, _F) for name in ("a", "b", "rate"))
    program = Program(
        "p", nodes, ("x",), variables, (Ref("again"),), ("call_a", "call_b", "decay"), functions={"f": body}
    )
    return _before(inline(program))


def test_accesses_of_a_variable_wait_for_those_of_the_same_only() -> None:
    order = _around_updates(_updating())
    needed = (
        ("read_a", "call_a/write"), ("call_a/old", "call_a/write"), ("call_a/step", "decay"), ("call_b/step", "decay"),
        ("call_a/write", "again"),
    )  # fmt: skip
    for before, after in needed:
        assert order.has_edge(before, after), (before, after)
    for before, after in (("read_a", "call_a/step"), ("call_a/write", "decay"), ("call_b/write", "again")):
        assert not order.has_edge(before, after), (before, after)


def test_accesses_wait_for_whole_calls_that_do_more() -> None:
    order = _around_updates(_updating(_print("say")))
    for before in ("call_a/say", "call_a/write", "call_b/say", "call_b/write"):
        assert order.has_edge(before, "decay"), before


def test_reads_in_a_call_wait_for_writes_of_their_variable() -> None:
    call = Node("call", "StatefulPartitionedCall", (Ref("a"), Ref("rate")), ("decay",), {"f": Func("f")}, (), "", True)
    nodes = (_arg("x"), _handle("a"), _handle("rate"), _write("decay", "rate", "x"), call)
    variables = tuple(Variable(name, name, _F) for name in ("a", "rate"))
    order = _before(inline(Program("p", nodes, ("x",), variables, (), ("decay", "call"), functions={"f": _updating()})))
    assert order.has_edge("decay", "call/step")
    assert not order.has_edge("decay", "call/old")


def test_names_are_unique() -> None:
    taken = Node("call/out", "Abs", (Ref("a"),), outputs=(_F,))
    nodes = (_arg("a"), taken, _call("call", "noisy", (Ref("call/out"),)))
    flat = inline(Program("p", nodes, ("a",), (), (Ref("call"),), ("call",), {"noisy": _noisy_body()}))
    assert len({n.name for n in flat.nodes}) == len(flat.nodes)
    assert flat.outputs == (Ref("call/out_1"),)
    assert flat.by_name["call/out_1"].inputs == (Ref("call/out"),)


def test_types_that_only_the_call_knew_stay() -> None:
    loose = TensorType("float32", (None, 3))
    x = Node("x", "Placeholder", outputs=(loose,))
    body = Program("f", (x, Node("y", "Abs", (Ref("x"),), outputs=(loose,))), ("x",), outputs=(Ref("y"),))
    known = TensorType("float32", (4, None))
    nodes = (Node("a", "Placeholder", outputs=(known,)), _call("call", "f", (Ref("a"),), outputs=(known,)))
    flat = inline(Program("p", nodes, ("a",), (), (Ref("call"),), (), {"f": body}))
    assert flat.find_type(flat.outputs[0]) == TensorType("float32", (4, 3))


def test_scope_of_the_call_reaches_the_body() -> None:
    own = Node("own", "Abs", (Ref("x"),), outputs=(_F,), scope="inner")
    body = Program("f", (_arg("x"), own, Node("y", "Neg", (Ref("own"),), outputs=(_F,))), ("x",), outputs=(Ref("y"),))
    nodes = (_arg("a"), _call("call", "f", (Ref("a"),), scope="outer"))
    flat = inline(Program("p", nodes, ("a",), (), (Ref("call"),), (), {"f": body}))
    assert {n.name: n.scope for n in flat.nodes} == {"a": "", "call/own": "inner", "call/y": "outer"}


def test_recursion_is_refused() -> None:
    body = Program("f", (_arg("x"), _call("again", "f", (Ref("x"),))), ("x",), outputs=(Ref("again"),))
    with pytest.raises(ProgramError, match="calls itself"):
        inline(Program("p", (_arg("a"), _call("call", "f", (Ref("a"),))), ("a",), (), (Ref("call"),), (), {"f": body}))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_needs_xla_in_compiled_functions_is_marked(compiled: bool) -> None:
    def inner(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.nn.tanh(tf.nn.conv2d(x, k, 1, "SAME"))
        return tf.nn.max_pool2d(tf.transpose(x, [0, 3, 1, 2]), 2, 2, "VALID", data_format="NCHW")

    compiled_inner = tf.function(inner, jit_compile=compiled)
    image, kernel = np.zeros((1, 4, 4, 2), np.float32), np.zeros((3, 3, 1, 2), np.float32)  # of two groups
    flat = inline(capture_function(lambda x, k: compiled_inner(x, k) + 1.0, [image, kernel]).program)
    graphs = [flat, *flat.functions.values()]
    assert not {n.op for g in graphs for n in g.nodes} & CALLS
    marked = {n.op for g in graphs for n in g.nodes if n.attrs.get(COMPILED)}
    assert marked == ({"Conv2D", "MaxPool"} if compiled else set())


def test_nested_calls_under_a_tape_and_in_a_loop() -> None:
    v = tf.Variable(np.full((3, 3), 0.1, np.float32))
    count = tf.Variable(0)

    @tf.function
    def innermost(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        return tf.tanh(x @ v)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return innermost(innermost(x))

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = inner(x)
            for _ in tf.range(2):
                y = inner(y)
            loss = tf.reduce_mean(y)
        gradient = tape.gradient(loss, v)
        v.assign_sub(gradient)
        return loss, gradient

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    start = v.numpy()
    expected = [t.numpy() for t in tf.function(step)(x)]
    expected += [v.numpy(), count.numpy()]
    v.assign(start)
    count.assign(0)
    captured = capture_function(step, [x])
    flat = inline(captured.program)
    assert any(n.op in CALLS for n in captured.program.nodes)
    graphs = [flat, *flat.functions.values()]
    assert not {n.op for graph in graphs for n in graph.nodes} & CALLS
    assert flat.functions.keys() < captured.program.functions.keys()
    found = [t.numpy() for t in captured.pack_outputs(rebuilt(captured, (inline,))(x))]
    found += [v.numpy(), count.numpy()]
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert count.numpy() == 6


def test_shapes_inside_a_function_with_unknown_sizes_are_those_of_the_call() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x) * 2.0

    program = inline(capture_function(lambda x: inner(x), [np.ones((4, 3), np.float32)]).program)
    assert all(t.is_static for n in program.nodes for t in n.outputs)


def test_recurrent_layer_keeps_one_of_its_implementations() -> None:
    layer = tf.keras.layers.LSTM(4)
    layer.build((2, 5, 3))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, layer.trainable_variables)

    flat = inline(capture_function(step, [np.ones((2, 5, 3), np.float32)]).program)
    ops = {n.op for graph in (flat, *flat.functions.values()) for n in graph.nodes}
    assert not ops & CALLS
    assert not {op for op in ops if "Cudnn" in op}
    assert len(flat.functions) == 4, "condition and body of the loop and of its gradient"
