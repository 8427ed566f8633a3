"""Marks what came from functions that ask for XLA, which are inlined.

Layouts change inside of such a function, and exchanges cannot be inside of what XLA compiles. So it is inlined, and its
nodes are marked; in each rank's program they are compiled again, in clusters between exchanges
(``whale.kernels.clusters``). Some nodes have no kernel on the CPU: gradients of grouped or dilated convolutions,
convolutions and pooling with the channels first, XLA's own ops. Those are compiled in any case (``whale.kernels.xla``).

Decisions: 0020, 0169.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale.ir.ops import CONVOLUTIONS, FILTER_GRADIENTS
from whale.ir.program import COMPILED, Node, Program, iterate_function_refs

# Of these every kernel for the CPU has gradients' kernels beside it.
_CONVOLVED = frozenset({"float16", "bfloat16", "float32", "float64"})


def asks_for_xla(call: Node) -> bool:
    """Tells whether a call is of a function with ``jit_compile=True``."""
    return bool(call.attrs.get(COMPILED))


def mark_compiled(program: Program) -> Program:
    """Marks the nodes in the body of a compiled function; functions called from it are not changed."""

    def mark(node: Node) -> Node:
        attrs = {**node.attrs, COMPILED: True} if _needs_xla(program, node) else node.attrs
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


def _needs_xla(program: Program, node: Node) -> bool:
    """Tells whether a node has, or may have, no kernel on the CPU."""
    channels_first = str(node.attrs.get("data_format", "")).startswith("NC")
    if node.op not in CONVOLUTIONS:
        return node.op.startswith("Xla") or ("Pool" in node.op and channels_first)
    dilated = any(rate > 1 for rate in node.attrs.get("dilations", ()))
    known = node.op.startswith("Depthwise") or _has_one_group(program, node)
    return channels_first or dilated or not known or node.outputs[0].dtype not in _CONVOLVED


def _has_one_group(program: Program, node: Node) -> bool:
    """Tells whether all of a convolution's filters see all channels, with the channels last."""
    if node.op == "Conv" or (node.op.startswith("Conv2D") and node.op.endswith("V2")):
        return False  # TensorFlow's gradients make none of these
    images, kernel = node.outputs[0], node.outputs[0]
    if "BackpropInput" not in node.op:
        images = program.find_type(node.inputs[0])
    if node.op not in FILTER_GRADIENTS:
        kernel = program.find_type(node.inputs[1])
    if images.shape is None or kernel.shape is None:
        return False
    return images.shape[-1] is not None and images.shape[-1] == kernel.shape[-2]
