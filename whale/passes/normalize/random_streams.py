"""Marks random operations that have their own stream with a name that programs for other shapes use as well.

In one process, a trace has one kernel for such an operation, whatever the shapes it is called with; its stream
continues from call to call. A program, however, is compiled for one set of shapes.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.ops import DRAWS
from whale.ir.program import COMPILED, Node, Program


def mark_streams(program: Program) -> Program:
    """Returns ``program`` with every seeded operation of ``DRAWS`` marked with the name of its stream, from its
    position.

    Operations that XLA compiles draw other numbers, and are not marked.
    """

    def mark_graph(graph: Program, path: str) -> Program:
        if not any(node.op in DRAWS for node in graph.nodes):
            return graph
        return graph.replace_nodes(tuple(_mark_node(node, path) for node in graph.nodes), functions=graph.functions)

    functions = {name: mark_graph(body, f"{name}/") for name, body in program.functions.items()}
    return replace(mark_graph(program, ""), functions=functions)


def _mark_node(node: Node, path: str) -> Node:
    seeded = node.op in DRAWS and (node.attrs.get("seed") or node.attrs.get("seed2"))
    if not seeded or node.attrs.get(COMPILED):
        return node
    return node.with_marks(stream=path + node.name)
