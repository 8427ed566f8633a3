"""Marks what came from functions that ask for XLA, which are inlined.

Layouts change inside of such a function, and exchanges cannot be inside of what XLA compiles. So it is inlined, and its
nodes are marked; in each rank's program they are compiled again, in clusters between exchanges
(``whale.kernels.clusters``). Some nodes have no kernel on the CPU: gradients of grouped or dilated convolutions, three
dimensions with the channels first, pooling with the channels first, XLA's own ops. Those are compiled in any case
(``whale.kernels.xla``).

Decisions: 0020, 0169.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale.ir.ops import CONVOLUTIONS
from whale.ir.program import COMPILED, Node, Program, iterate_function_refs


def asks_for_xla(call: Node) -> bool:
    """Tells whether a call is of a function with ``jit_compile=True``."""
    return bool(call.attrs.get(COMPILED))


def mark_compiled(program: Program) -> Program:
    """Marks the nodes in the body of a compiled function; functions called from it are not changed."""

    def mark(node: Node) -> Node:
        attrs = {**node.attrs, COMPILED: True} if _needs_xla(node) else node.attrs
        return replace(node, attrs=attrs, marks=node.marks.replace_marks(compiled=True))

    return program.replace_nodes(tuple(map(mark, program.nodes)))


def list_called(program: Program, functions: Mapping[str, Program]) -> set[str]:
    """Returns the names of the functions that loops and branches of ``program`` run, including nested ones."""
    found: set[str] = set()
    bodies = [program]
    while bodies:
        for node in bodies.pop().nodes:
            for _, func in iterate_function_refs(node):
                if func.name in functions and func.name not in found:
                    found.add(func.name)
                    bodies.append(functions[func.name])
    return found


def _needs_xla(node: Node) -> bool:
    if node.op in CONVOLUTIONS or node.op.startswith("Xla"):
        return True
    return "Pool" in node.op and str(node.attrs.get("data_format", "")).startswith("NC")
