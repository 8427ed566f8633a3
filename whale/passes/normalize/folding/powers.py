"""Replaces powers with well-known exponents by cheaper ops: a square root is ten times as fast as ``Pow``.

TensorFlow's graph optimizer does the same (its stage ConvertPow), but does not run on the ranks' programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale.ir.program import Node, Program

_OPS = {2.0: "Square", 0.5: "Sqrt", -0.5: "Rsqrt", -1.0: "Reciprocal", 1.0: "Identity"}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def powers(program: Program) -> Program:
    """Replaces powers of floating-point numbers with a constant exponent in ``program`` and its functions."""
    functions = {name: _rewrite_graph(body) for name, body in program.functions.items()}
    return replace(_rewrite_graph(program), functions=functions)


def _rewrite_graph(program: Program) -> Program:
    if not any(n.op == "Pow" for n in program.nodes):
        return program
    return program.replace_nodes(tuple(_other(n, program.by_name) if n.op == "Pow" else n for n in program.nodes))


def _other(node: Node, nodes: Mapping[str, Node]) -> Node:
    base, exponent = node.inputs
    constant = nodes[exponent.node]
    if constant.op != "Const" or constant.outputs[0].shape != () or node.outputs[0].dtype not in _FLOATS:
        return node
    op = _OPS.get(float(constant.attrs["value"].numpy()))
    if op is None:
        return node
    # The reader waits for what the constant waited for.
    return replace(node, op=op, inputs=(base,), controls=tuple(dict.fromkeys((*node.controls, *constant.controls))))
