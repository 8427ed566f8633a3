"""Removes dependencies from a rank's program that would unnecessarily tie micro-batches to each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whale.ir.marks import NO_MARKS
from whale.ir.ops import EXCHANGES, HAS_BODIES, READS
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import UNMOVABLE, DType, find_numpy_dtype, require_static_shape
from whale.passes.analysis.scopes import ranks_of_scope, with_paths, with_ranks
from whale.sharding_rules.graph import list_called_functions

_LIKE = {"OnesLike": 1, "ZerosLike": 0}
_LOOKS = READS | {"VarHandleOp", "WhaleCommunicator"}  # these two only name what others look at


def prepare(program: Program) -> Program:
    """Removes control edges and operands without effect that would tie a micro-batch to others.

    These are control edges between nodes without effects, or from an assertion, which concerns the whole batch; and
    operands that only give a shape to ones and zeros. Recomputed nodes keep their control edges from the backward pass.
    Scopes lose their ranks, since the ranks' work is divided already.
    """
    if any(ranks_of_scope(node.scope) is not None for node in program.nodes):
        program = with_paths(program, lambda path: "/".join(with_ranks(part, ()) for part in path.split("/")))
    nodes: list[Node] = []
    behind_effects: set[str] = set()
    asserted: set[str] = set()  # assertions, and what stands for them: updates wait for these
    waits: dict[str, tuple[str, ...]] = {}  # a NoOp -> what it waits for, and with it who waits for it
    for node in program.nodes:
        if node.controls:
            controls = tuple(dict.fromkeys(c for name in node.controls for c in waits.get(name, (name,))))
            node = replace(node, controls=controls)
        if node.op == "NoOp":
            waits[node.name] = node.controls
        does = acts(program, node)
        if (does and _asserts(program, node)) or (node.inputs and all(r.node in asserted for r in node.inputs)):
            asserted.add(node.name)
        if not does and not asserted.isdisjoint(node.controls):
            node = replace(node, controls=tuple(c for c in node.controls if c not in asserted))
        if node.controls and not node.stateful and not node.marks.recomputed:
            # The order in which weights are gathered for their uses is one of the ranks, within each micro-batch.
            kept = () if node.marks.gathered_at_use else tuple(c for c in node.controls if c in behind_effects)
            node = replace(node, controls=kept)
        if does or not behind_effects.isdisjoint([*(r.node for r in node.inputs), *node.controls]):
            behind_effects.add(node.name)
        if _is_nothing(node):
            node = make_const(
                node.name, np.zeros(require_static_shape(node.outputs[0]), find_numpy_dtype(node.outputs[0].dtype))
            )
        if node.op in _LIKE and node.outputs[0].is_static and node.outputs[0].dtype not in UNMOVABLE:
            (t,) = node.outputs
            value = np.full((), _LIKE[node.op], find_numpy_dtype(t.dtype))
            names = f"{node.name}/whale_dims", f"{node.name}/whale_value"
            nodes += [make_const(names[0], np.array(t.shape, np.int32)), make_const(names[1], value)]
            attrs = {"T": DType(t.dtype), "index_type": DType("int32")}
            filled = Ref(names[0]), Ref(names[1])
            node = replace(node, op="Fill", inputs=filled, attrs=attrs, controls=(), marks=NO_MARKS)
        nodes.append(node)
    return program.replace_nodes(tuple(nodes))


def _is_nothing(node: Node) -> bool:
    """Tells whether a node makes no rows, so that a rank without rows computes it as well."""
    if node.stateful or node.op in ("Const", "Placeholder") or len(node.outputs) != 1:
        return False
    t = node.outputs[0]
    return t.is_static and t.dtype not in UNMOVABLE and require_static_shape(t)[:1] == (0,)


def acts(program: Program, node: Node) -> bool:
    """Tells whether a node has effects; a branch or loop that only reads variables has none."""
    if not node.stateful or node.op in _LOOKS or node.op in EXCHANGES:
        return False
    bodies = [program.functions[f.name] for f in list_called_functions(node)] if node.op in HAS_BODIES else []
    return not bodies or any(acts(program, inside) for body in bodies for inside in body.nodes)


def _asserts(program: Program, node: Node) -> bool:
    """Tells whether a node only fails if a condition is false."""
    if node.op == "Assert" or node.op not in HAS_BODIES:
        return node.op == "Assert"
    bodies = [program.functions[f.name] for f in list_called_functions(node)]
    return all(_asserts(program, inside) or not acts(program, inside) for body in bodies for inside in body.nodes)
