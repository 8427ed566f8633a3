"""Finds inputs that are a stack of batches, [k, rows, ...], from which a step takes one batch at a time, mostly in a
loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from whale.ir.ops import ASKS_SHAPE, BRANCHES, IDENTITIES, LOOPS
from whale.ir.program import Node, Program, Ref
from whale.sharding_rules.graph import list_called_functions

_FIRST = 1  # the bit of the first dimension in the masks of a slice


def stacks(program: Program) -> frozenset[str]:
    """Returns the inputs that are stacks of batches: all readers take single elements of dimension 0, so that rows are
    dimension 1.

    If one of these inputs has no dimension 1, its elements are rows rather than batches, and the result is empty.
    """
    shapes = {name: program.by_name[name].outputs[0].shape or () for name in program.inputs}
    apart = [name for name, shape in shapes.items() if shape and _is_taken_apart(program, program, Ref(name)) is True]
    return frozenset(apart) if all(len(shapes[name]) > 1 for name in apart) else frozenset()


def _is_taken_apart(program: Program, graph: Program, ref: Ref) -> bool | None:
    """Tells whether every reader takes one element of a tensor at a time; None if nothing reads the tensor."""
    if ref in graph.outputs:
        return False
    return _all_or_none(_takes_apart(program, graph, node, place) for node, place in graph.consumers.get(ref, ()))


def _all_or_none(found: Iterable[bool | None]) -> bool | None:
    known = [one for one in found if one is not None]
    return all(known) if known else None


def _takes_apart(program: Program, graph: Program, node: Node, place: int) -> bool | None:
    """Tells whether ``node`` takes one element at a time of the tensor that is its operand number ``place``."""
    if node.op in IDENTITIES:
        return _is_taken_apart(program, graph, Ref(node.name))
    if node.op in ASKS_SHAPE:
        return None
    if node.op in LOOPS or node.op in BRANCHES:
        return _inside(program, graph, node, place)
    if place != 0:
        return False
    if node.op == "StridedSlice":
        masks = {key: int(node.attrs.get(f"{key}_mask", 0)) for key in ("shrink_axis", "new_axis", "ellipsis")}
        return bool(masks["shrink_axis"] & _FIRST) and not (masks["new_axis"] | masks["ellipsis"]) & _FIRST
    if node.op in ("GatherV2", "Gather"):
        axis = graph.const(node.inputs[2]) if node.op == "GatherV2" else 0
        one = graph.find_type(node.inputs[1]).shape == ()
        return one and axis is not None and int(axis) == 0 and not node.attrs.get("batch_dims", 0)
    if node.op == "Unpack":
        return int(node.attrs.get("axis", 0)) == 0
    return node.op == "TensorListFromTensor"


def _inside(program: Program, graph: Program, node: Node, place: int) -> bool | None:
    """Tells whether the functions of a loop or branch take one element of operand ``place`` at a time; a loop may pass
    it on.
    """
    first = 0 if node.op in LOOPS else 1
    if place < first:
        return False
    found: list[bool | None] = []
    for func in list_called_functions(node):
        body = program.functions[func.name]
        argument = Ref(body.inputs[place - first])
        if node.op in LOOPS and len(body.outputs) == len(body.inputs):
            if _origin(body, body.outputs[place]) != argument:
                return False
            kept = tuple(ref for i, ref in enumerate(body.outputs) if i != place)
            body = body.replace_nodes(body.nodes, outputs=kept)
        found.append(_is_taken_apart(program, body, argument))
    if node.op in LOOPS:
        found.append(_is_taken_apart(program, graph, Ref(node.name, place)))
    return _all_or_none(found)


def _origin(graph: Program, ref: Ref) -> Ref:
    node = graph.by_name[ref.node]
    while node.op in IDENTITIES:
        ref = node.inputs[0]
        node = graph.by_name[ref.node]
    return ref
