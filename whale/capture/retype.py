"""Infers the static types of a program again after it was changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from whale.capture.bodies import import_settled_graph
from whale.capture.encode import encode_graph_def
from whale.capture.graph import read_graph
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.ir.values import Func, TensorType


def is_loose(program: Program) -> bool:
    """Tells whether a branch takes values of unknown sizes out of optionals.

    An optional records the sizes that its value had when the graph was built; with other inputs these are too loose.
    """
    return any(
        node.op == "OptionalGetValue" and not all(t.is_static for t in node.outputs)
        for body in program.functions.values()
        for node in body.nodes
    )


def retype(program: Program) -> Program:
    """Returns ``program`` with the types that TensorFlow now infers for it; types that were static stay so."""
    renamed = _make_names_plain(program)
    graph_def = encode_graph_def(renamed)
    graph = import_settled_graph(graph_def)

    def find_tensor(ref: Ref) -> tf.Tensor:
        return graph.get_tensor_by_name(f"{ref.node}:{ref.index}")

    better: dict[Ref, TensorType] = {
        ref: t
        for node in program.nodes
        for ref, t in zip(node.list_refs(), node.outputs)
        if t.is_static and not find_tensor(ref).shape.is_fully_defined()
    }
    typed = read_graph(
        graph,
        name=program.name,
        inputs=[find_tensor(Ref(name)) for name in program.inputs],
        variables=[(find_tensor(Ref(v.node)), v.name, v.type.dtype, v.type.shape) for v in program.variables],
        outputs=[find_tensor(ref) for ref in program.outputs],
        effects=[graph.get_operation_by_name(name) for name in program.effects],
        types=better,
    )
    scopes = {n.name: n.scope for n in program.nodes}
    return replace(typed, nodes=tuple(replace(n, scope=scopes[n.name]) for n in typed.nodes))


def _make_names_plain(program: Program) -> Program:
    """Renames functions to names that a function library accepts."""
    names = {old: f"body_{i}" for i, old in enumerate(program.functions)}

    def rename_value(value: Any) -> Any:
        if isinstance(value, Func):
            return replace(value, name=names.get(value.name, value.name))
        return tuple(map(rename_value, value)) if isinstance(value, tuple) else value

    def rename_node(node: Node) -> Node:
        changes = {key: rename_value(node.attrs[key]) for key, _ in iterate_function_refs(node)}
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    def rename_graph(graph: Program) -> Program:
        return graph.replace_nodes(tuple(map(rename_node, graph.nodes)))

    functions = {names[old]: replace(rename_graph(body), name=names[old]) for old, body in program.functions.items()}
    return replace(rename_graph(program), functions=functions)
