"""Merges operations that compute the same: scalars of an optimizer, and reads of a variable.

``share_scalars``: Keras' optimizers read the learning rate and the step number, and compute bias corrections, again for
every variable, which is nearly half of a step's operations. Merging them leaves fewer nodes to all later passes.

``merge_reads``: TensorFlow 1 reads a variable again for every use. If the variable is sharded between steps and
gathered where it is read (ZeRO), each of these reads would be an all-gather.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from whale.ir.marks import NO_MARKS
from whale.ir.ops import RANDOM, UPDATES
from whale.ir.program import Node, Program, Ref, Variable, rewire
from whale.ir.values import UNMOVABLE, Func


def share_scalars(program: Program) -> Program:
    """Merges equal scalars that updates use: those computed from constants and from reads of scalar variables.

    Equal operations on equal operands have equal results. So have reads of a variable without control inputs: they
    return the value from the beginning of the step. Nodes of different scopes are not merged, since they may belong to
    different pipeline stages.
    """
    behind = _find_behind_updates(program)
    handles = program.variable_of
    known: dict[Hashable, Ref] = {}
    scalars: set[Ref] = set()
    moved: dict[Ref, Ref] = {}
    attrs: dict[Hashable, int] = {}
    for node in program.nodes:
        if node.name not in behind or not _may_be_shared(node, handles):
            continue
        inputs = tuple([moved.get(ref, ref) for ref in node.inputs])
        if node.op != "ReadVariableOp" and not scalars.issuperset(inputs):
            continue
        what = _values(node.attrs, attrs)
        if what < 0:
            continue
        own = Ref(node.name)
        marks = None if node.marks is NO_MARKS else node.marks  # hashing marks takes long: they have many fields
        first = known.setdefault((node.op, node.scope, inputs, node.outputs, marks, what), own)
        scalars.add(first)
        if first is not own:
            moved[own] = first
    if not moved:
        return program
    gone = {ref.node for ref in moved}
    return rewire(program, {n.name: n for n in program.nodes if n.name not in gone}, moved)


def _find_behind_updates(program: Program) -> set[str]:
    """Returns the names of the nodes that compute operands of updates element by element, and of the scalars that these
    nodes read. ``share_scalars`` merges equal ones among these scalars.
    """
    found: set[str] = set()
    nodes = program.by_name
    for node in reversed(program.nodes):
        if node.op in UPDATES:
            found.update([ref.node for ref in node.inputs])
        elif node.name in found and not node.stateful and len(node.outputs) == 1:
            shape = node.outputs[0].shape
            for name, index in node.inputs:
                operand = nodes[name].outputs[index]
                if operand.is_static and (operand.shape == shape or operand.elements == 1):
                    found.add(name)
    return found


def _may_be_shared(node: Node, handles: Mapping[str, Variable]) -> bool:
    """Returns True if a node yields a single number that depends on its operands and attributes only, or reads a
    variable at the beginning of the step.
    """
    if node.controls or len(node.outputs) != 1:
        return False
    kind = node.outputs[0]
    if not kind.is_static or kind.elements != 1 or kind.dtype in UNMOVABLE:
        return False
    if node.op == "ReadVariableOp":
        return node.inputs[0].node in handles
    return not (node.stateful or node.op in RANDOM) and bool(node.inputs or node.op == "Const")


def _values(attrs: Mapping[str, Any], known: dict[Hashable, int]) -> int:
    """Returns a number that identifies the attributes of a node: nodes of one op with equal numbers compute the same
    from the same operands. Returns -1 if equality cannot be decided.

    Args:
      known: the numbers assigned so far; a new one is added.
    """
    shared = getattr(attrs, "shared", None)
    number = known.get(shared) if shared is not None else None
    if number is None:
        # Equal attributes behave equally, except floats, since 0.0 == -0.0, and functions, which are not compared.
        unsure = any(isinstance(value, float | Func) or _has_functions(value) for value in attrs.values())
        number = -1 if unsure else known.setdefault(tuple(sorted(attrs.items())), len(known))
        if shared is not None:
            known[shared] = number
    return number


def merge_reads(program: Program) -> Program:
    """Replaces all reads of a variable's value from the beginning of the step by a single ``ReadVariableOp`` per scope.

    Reads without control inputs return that value; a read that must see a write waits for it by a control input. Reads
    in different scopes are not merged, since they may belong to different pipeline stages.
    """
    first: dict[tuple[Ref, str], str] = {}
    served: dict[str, str] = {}  # a removed read -> the read that replaces it
    for node in program.nodes:
        if node.op != "ReadVariableOp" or node.controls or node.inputs[0].node not in program.variable_of:
            continue
        one = first.setdefault((node.inputs[0], node.scope), node.name)
        if one != node.name:
            served[node.name] = one
    if not served:
        return program

    def rewrite_ref(ref: Ref) -> Ref:
        return Ref(served[ref.node], ref.index) if ref.node in served else ref

    nodes = tuple(
        replace(
            node,
            inputs=tuple(map(rewrite_ref, node.inputs)),
            controls=tuple(dict.fromkeys(served.get(c, c) for c in node.controls)),
        )
        for node in program.nodes
        if node.name not in served
    )
    effects = tuple(dict.fromkeys(served.get(name, name) for name in program.effects))
    return program.replace_nodes(nodes, outputs=tuple(map(rewrite_ref, program.outputs)), effects=effects)


def _has_functions(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(one, Func) for one in value)
