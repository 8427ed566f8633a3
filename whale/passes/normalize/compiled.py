"""Inlines functions that ask for XLA, and marks the nodes for which TensorFlow may have no CPU kernel.

Communication cannot be inside a compiled region, so such a function is inlined. For most nodes XLA is only an
optimisation. Some ops need it: on the CPU there is no kernel for the gradients of grouped or dilated convolutions, for
three dimensions with the channels first, for pooling with the channels first, and none for XLA's own ops. Each of these
is compiled separately again in every rank's program, unless that runs where it has kernels (``whale.kernels.xla``).

Decision: 0020.
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
    """Marks nodes in the body of a compiled function; functions called from it are not changed."""
    if not any(map(_needs_xla, program.nodes)):
        return program
    return program.replace_nodes(
        tuple(replace(n, attrs={**n.attrs, COMPILED: True}) if _needs_xla(n) else n for n in program.nodes)
    )


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
