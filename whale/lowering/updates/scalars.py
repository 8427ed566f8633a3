"""Scalars that are computed for each variable anew, though they are the same for all of them: computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from whale.ir.fingerprint import node_digest
from whale.ir.ops import RANDOM
from whale.ir.program import Node, Program, Ref, rewired
from whale.ir.values import UNMOVABLE
from whale.lowering.updates.accesses import Accesses


def share_scalars(program: Program, found: Accesses, wanted: Iterable[Ref], others: Collection[str]) -> Program:
    """``program`` in which equal values among ``wanted``, and among what they are computed of, are one.

    Nodes named in ``others`` stay as they are.

    Values are equal that the same operation makes of equal values, and reads that no write of their variable parts.
    """
    needed = _scalars_behind(program, found, wanted, others)
    known: dict[tuple[object, ...], Node] = {}
    moved: dict[Ref, Ref] = {}
    for node in program.nodes:
        if node.name not in needed:
            continue
        if node.op == "ReadVariableOp":
            key: tuple[object, ...] = (found.handle[node.name], found.version[node.name])
        else:
            plain = replace(node, name="", scope="", inputs=tuple(moved.get(ref, ref) for ref in node.inputs))
            key = (node.op, plain.inputs, node.outputs, node_digest(plain))
        first = known.setdefault(key, node)
        if first is not node:
            moved[Ref(node.name)] = Ref(first.name)
    if not moved:
        return program
    gone = {ref.node for ref in moved}
    return rewired(program, {n.name: n for n in program.nodes if n.name not in gone}, moved)


def _scalars_behind(program: Program, found: Accesses, wanted: Iterable[Ref], others: Collection[str]) -> set[str]:
    needed: set[str] = set()
    todo = [ref.node for ref in wanted]
    while todo:
        node = program.by_name[todo.pop()]
        if node.name in needed or node.name in others or not _is_scalar(node, found):
            continue
        needed.add(node.name)
        if node.op != "ReadVariableOp":
            todo += [ref.node for ref in node.inputs]
    return needed


def _is_scalar(node: Node, found: Accesses) -> bool:
    """Whether ``node`` makes one value of its operands, and of nothing else."""
    if len(node.outputs) != 1 or not node.outputs[0].is_static or node.outputs[0].elements > 1:
        return False
    if node.op == "ReadVariableOp":
        return found.handle.get(node.name, "") in found.seen
    if node.stateful or node.controls or node.op in RANDOM or node.outputs[0].dtype in UNMOVABLE:
        return False
    return node.op == "Const" or bool(node.inputs)
