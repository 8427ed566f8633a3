"""Gives generators memory of their own where TensorFlow's kernels write into memory that variables share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Tensor, TensorType

# Unlike all others that advance a generator, its kernel does not copy a state that other variables share, such as
# those of other ranks of the process: it would advance them all.
_WRITES_INTO_SHARED = "StatefulRandomBinomial"


def give_own_memory(program: Program) -> Program:
    """Lets ``RngSkip`` by nothing, which copies a shared state, precede each draw whose kernel does not."""
    functions = {name: _prepare_graph(body) for name, body in program.functions.items()}
    return replace(_prepare_graph(program), functions=functions)


def _prepare_graph(graph: Program) -> Program:
    if not any(n.op == _WRITES_INTO_SHARED for n in graph.nodes):
        return graph
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == _WRITES_INTO_SHARED:
            nothing, skip = f"{node.name}/by_nothing", f"{node.name}/own_memory"
            attrs = {"dtype": DType("int64"), "value": Tensor.from_numpy(np.array(0, "int64"))}
            nodes.append(Node(nothing, "Const", (), (), attrs, (TensorType("int64", ()),)))
            before = (*node.inputs[:2], Ref(nothing))
            nodes.append(Node(skip, "RngSkip", before, node.controls, {}, (), node.scope, True))
            node = replace(node, controls=(*node.controls, skip))
        nodes.append(node)
    return graph.replace_nodes(tuple(nodes))
