"""Removes a rank's exchanges from its program, so that what it computes alone can be measured.

What came from others is taken from what this rank hands over, in the shape that comes out, so that every kernel still
runs, on as many numbers and after the same ones. Values are of no use.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whale.ir.ops import EXCHANGES, MEETINGS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType, require_static_shape
from whale.passes.normalize.emitter import NodeEmitter

_JOINED = MEETINGS | {"WhaleCommunicator"}  # what only holds ranks together


def has_inner_exchanges(program: Program) -> bool:
    """Tells whether a loop or branch communicates: its exchanges cannot be left out."""
    return any(n.op in EXCHANGES or n.op in _JOINED for body in program.functions.values() for n in body.nodes)


def remove_exchanges(program: Program) -> Program:
    """Returns ``program`` without exchanges; what it only receives becomes inputs, what it only sends outputs."""
    nodes: dict[str, Node] = {}
    inputs, outputs = list(program.inputs), list(program.outputs)
    stands_for: dict[Ref, Ref] = {}
    waits_for: dict[str, tuple[str, ...]] = {n.name: () for n in program.nodes if n.op in _JOINED}
    taken = set(program.by_name)
    for node in program.nodes:
        if node.op in _JOINED:
            continue
        node = replace(
            node,
            inputs=tuple(stands_for.get(r, r) for r in node.inputs if r.node not in waits_for or r in stands_for),
            controls=tuple(dict.fromkeys(name for c in node.controls for name in waits_for.get(c, (c,)))),
        )
        if node.op not in EXCHANGES:
            nodes[node.name] = node
            continue
        outputs += node.inputs if not node.outputs else ()
        for k, kind in enumerate(node.outputs):
            if k < len(node.inputs):
                found = _reshape_to(NodeEmitter(program, node, nodes, taken), node.inputs[k], kind, inputs)
            else:
                found = _add_input(f"{node.name}/given", kind, nodes, inputs)
            stands_for[Ref(node.name, k)] = found
        stand = [stands_for[r].node for r in node.list_refs()] or [r.node for r in node.inputs]
        waits_for[node.name] = tuple(dict.fromkeys(stand))
    return replace(
        program,
        nodes=tuple(nodes.values()),
        inputs=tuple(inputs),
        outputs=tuple(stands_for.get(r, r) for r in outputs),
        effects=tuple(name for e in program.effects for name in waits_for.get(e, (e,))),
    )


def _add_input(name: str, kind: TensorType, nodes: dict[str, Node], inputs: list[str]) -> Ref:
    nodes[name] = Node(name, "Placeholder", (), (), {"dtype": DType(kind.dtype)}, (kind,))
    inputs.append(name)
    return Ref(name)


def _reshape_to(emit: NodeEmitter, source: Ref, kind: TensorType, inputs: list[str]) -> Ref:
    """Returns ``source`` in the shape of ``kind``: its first numbers, or followed by as many as are missing."""
    own = emit.type_of(source)
    if own.shape == kind.shape:
        return emit.node_of("apart", "Identity", (source,), kind, {"T": DType(kind.dtype)})
    index, dtype = DType("int32"), DType(kind.dtype)
    flat = emit.const("flat", np.array([-1], np.int32))
    shaped = {"T": dtype, "Tshape": index}
    row = emit.node_of("row", "Reshape", (source, flat), TensorType(kind.dtype, (own.elements,)), shaped)
    missing = kind.elements - own.elements
    part = TensorType(kind.dtype, (kind.elements,))
    if missing > 0:
        rest = _add_input(f"{emit.node.name}/rest", TensorType(kind.dtype, (missing,)), emit.nodes, inputs)
        axis = emit.const("axis", np.array(0, np.int32))
        row = emit.node_of("more", "ConcatV2", (row, rest, axis), part, {"N": 2, "T": dtype, "Tidx": index})
    elif missing < 0:
        begin, size = (emit.const(n, np.array([v], np.int32)) for n, v in (("begin", 0), ("size", kind.elements)))
        row = emit.node_of("part", "Slice", (row, begin, size), part, {"T": dtype, "Index": index})
    shape = emit.const("shape", np.array(require_static_shape(kind), np.int32))
    return emit.node_of("apart", "Reshape", (row, shape), kind, shaped)
