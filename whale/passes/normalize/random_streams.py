"""Random operations with a stream of their own are marked with its name, by which programs of other shapes know it.

In one process, a trace has one kernel for such an operation, whatever the shapes are that it is called with; its stream
goes on from call to call. A program is for some shapes only.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.ops import DRAWS
from whale.ir.program import COMPILED, Node, Program


def mark_streams(program: Program) -> Program:
    """``program`` in which every seeded operation of ``DRAWS`` has the name of its stream: where it stands in it.

    What XLA compiles draws otherwise, and has none.
    """

    def marked(graph: Program, path: str) -> Program:
        if not any(node.op in DRAWS for node in graph.nodes):
            return graph
        return graph.replace_nodes(tuple(_marked(node, path) for node in graph.nodes), functions=graph.functions)

    functions = {name: marked(body, f"{name}/") for name, body in program.functions.items()}
    return replace(marked(program, ""), functions=functions)


def _marked(node: Node, path: str) -> Node:
    seeded = node.op in DRAWS and (node.attrs.get("seed") or node.attrs.get("seed2"))
    if not seeded or node.attrs.get(COMPILED):
        return node
    return node.marked(stream=path + node.name)
