"""Writes gradients of what is broadcast over a batch of one row as those over larger batches: as a sum over rows.

TensorFlow's gradient of a broadcast (a bias) sums over the dimensions that were broadcast, and then reshapes to the
operand's shape. A dimension of size 1, such as the rows of a last batch with one row, it leaves to the reshape, through
which a tensor that is sharded by rows cannot pass: its rows would be gathered, in loops and branches even inside their
bodies. A sum over one element is that element, so the sum here takes in the dimensions that the reshape takes away.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import DType, Tensor, TensorType


def sum_single_rows(program: Program) -> Program:
    """Replaces each Sum and the Reshape that only takes leading dimensions of size 1 from it by one Sum, in the program
    and its functions.
    """
    functions = {name: _rewrite_graph(body) for name, body in program.functions.items()}
    main = _rewrite_graph(program)
    if main is program and all(functions[name] is body for name, body in program.functions.items()):
        return program
    return replace(main, functions=functions)


def _rewrite_graph(graph: Program) -> Program:
    if not {"Sum", "Reshape"} <= graph.ops:
        return graph
    readers = Counter(r for node in graph.nodes for r in node.inputs) + Counter(graph.outputs)
    awaited = {name for node in graph.nodes for name in node.controls}
    changed: dict[str, tuple[Node, ...]] = {}
    for node in graph.nodes:
        source = graph.by_name[node.inputs[0].node] if node.op == "Reshape" else None
        if source is None or source.op != "Sum" or readers[Ref(source.name)] > 1 or source.name in awaited:
            continue
        axes = _find_axes(graph, source, node.outputs[0])
        if axes is not None:
            over = replace(make_const(f"{node.name}/whale_axes", np.array(axes, np.int32)), scope=node.scope)
            attrs = {**source.attrs, "keep_dims": False, "Tidx": DType("int32")}
            controls = tuple(dict.fromkeys((*source.controls, *node.controls)))
            operands = (source.inputs[0], Ref(over.name))
            changed[source.name] = ()
            changed[node.name] = (over, replace(source, name=node.name, inputs=operands, controls=controls, attrs=attrs,
                                                outputs=node.outputs))  # fmt: skip
    if not changed:
        return graph
    return graph.replace_nodes(tuple(new for node in graph.nodes for new in changed.get(node.name, (node,))))


def _find_axes(graph: Program, node: Node, result: TensorType) -> list[int] | None:
    """Returns the axes of a Sum whose result has the type ``result``: those of ``node``, a Sum, and leading dimensions
    of size 1; None if there is no such Sum, or the types do not tell.
    """
    axes, operand = graph.by_name[node.inputs[1].node], graph.find_type(node.inputs[0])
    value = axes.attrs.get("value") if axes.op == "Const" else None
    if not isinstance(value, Tensor) or not operand.is_static or not operand.shape or not result.is_static:
        return None
    rank = len(operand.shape)
    summed = {int(a) % rank for a in value.numpy().reshape(-1)}
    for count in range(rank + 1):
        if all(n == 1 or d in summed for d, n in enumerate(operand.shape[:count])):
            found = summed | set(range(count))
            if found != summed and result.shape == tuple(n for d, n in enumerate(operand.shape) if d not in found):
                return sorted(found)
    return None
