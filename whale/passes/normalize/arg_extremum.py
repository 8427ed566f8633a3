"""Decomposes ArgMax and ArgMin into simple ops, so that the dimension they search can be split.

The result is the smallest of the indices whose element equals the extremum, so both reductions are over parts. Where no
element equals it (NaN) the index is 0.
"""

from __future__ import annotations

import numpy as np

from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType, require_static_shape
from whale.passes.normalize.emitter import NodeEmitter


def is_arg_extremum(program: Program, node: Node) -> bool:
    """Tells whether ``arg_extremum`` can decompose the node: shape and dimension are known."""
    if node.op not in ("ArgMax", "ArgMin"):
        return False
    kind = program.find_type(node.inputs[0])
    floating = kind.dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64")
    return floating and kind.is_static and bool(kind.shape) and program.const(node.inputs[1]) is not None


def arg_extremum(emit: NodeEmitter) -> list[Ref]:
    """Adds simple nodes that compute the output of the emitter's ArgMax or ArgMin node."""
    node, x = emit.node, emit.node.inputs[0]
    shape = require_static_shape(emit.type_of(x))
    at = int(np.asarray(emit.program.const(node.inputs[1])).reshape(())) % len(shape)
    index = node.outputs[0].dtype
    largest = emit.reduce_over("whale_max", "Max" if node.op == "ArgMax" else "Min", x, (at,), keep=True)
    attrs = {"T": DType(emit.dtype), "incompatible_shape_error": True}
    hit = emit.node_of("hit", "Equal", (x, largest), TensorType("bool", shape), attrs)
    wide = tuple(n if d == at else 1 for d, n in enumerate(shape))
    numbers = emit.const("numbers", np.arange(shape[at], dtype=index).reshape(wide))
    size = emit.const("size", np.array(shape[at], index))
    emit.dtype = index
    found = emit.add("candidates", "SelectV2", (hit, numbers, size), shape)
    first = emit.reduce_over("first", "Min", found, (at,), keep=False)
    return [emit.add("index", "FloorMod", (first, size), shape[:at] + shape[at + 1 :])]
