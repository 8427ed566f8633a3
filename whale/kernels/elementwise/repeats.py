"""Moves arithmetic on a repeated tensor before the repetition, where there are fewer elements."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from whale.ir.program import Node, Program, Ref, remove_unread
from whale.ir.values import TensorType
from whale.kernels.elementwise.operations import REPEATS, find_elementwise_type


class _Repeat(NamedTuple):
    """A node that repeats a tensor, and the type of what it repeats."""

    node: Node
    given: TensorType


def move_repeats_last(program: Program) -> Program:
    """Makes arithmetic on repeated rows or columns, and scalars, come before these are repeated.

    The gradient of a mean divides a whole tensor by a number after each of its rows was made the same.
    """
    repeats: dict[Ref, _Repeat] = {}  # by what they make
    nodes: list[Node] = []
    for node in program.nodes:
        if node.op in REPEATS:
            # Where it waits, what is done to the tensor has to wait, too.
            if not node.controls and _is_movable(program, node):
                repeats[Ref(node.name)] = _Repeat(node, program.find_type(node.inputs[0]))
        elif not repeats.keys().isdisjoint(node.inputs) and _is_movable(program, node):
            if (repeat := _find_common_repeat(program, node, repeats)) is not None:
                given = tuple([repeats[ref].node.inputs[0] if ref in repeats else ref for ref in node.inputs])
                once = replace(node, name=f"{node.name}/whale_once", inputs=given, outputs=(repeat.given,))
                again = (Ref(once.name), *repeat.node.inputs[1:])
                nodes.append(once)
                node = replace(repeat.node, name=node.name, inputs=again, controls=())
                repeats[Ref(node.name)] = _Repeat(node, repeat.given)
        nodes.append(node)
    if len(nodes) == len(program.nodes):
        return program
    return remove_unread(program.replace_nodes(tuple(nodes)), {ref.node for ref in repeats})


def _is_movable(program: Program, node: Node) -> bool:
    return not node.marks.recomputed and find_elementwise_type(program, node) is not None


def _find_common_repeat(program: Program, node: Node, repeats: dict[Ref, _Repeat]) -> _Repeat | None:
    """Returns how all operands but scalars are repeated, if in one way, which makes the size of the result."""
    found = [repeats[ref] for ref in node.inputs if ref in repeats]
    if not found or any((one.given, one.node.outputs) != (found[0].given, node.outputs) for one in found):
        return None
    rank = len(found[0].given.shape or ())
    if node.op == "BiasAdd" and rank < 2:
        return None  # TensorFlow adds biases to the last dimension of several
    others = [program.find_type(ref) for ref in node.inputs if ref not in repeats]
    return found[0] if all(t.elements == 1 and len(t.shape or ()) <= rank for t in others) else None
