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
from whale.ir.values import UNMOVABLE, Func, TensorType


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
    numbers: dict[Hashable, int] = {}
    # Attributes and types are told apart by identity first, since thousands of nodes share them and comparing takes
    # long. The program holds the objects, so that no other gets their identity.
    of_attrs: dict[int, int] = {}
    of_types: dict[int, int] = {}
    for node in program.nodes:
        if node.name not in behind or node.controls:
            continue
        types = of_types.get(id(node.outputs))
        if types is None:
            types = numbers.setdefault(node.outputs, len(numbers)) if _is_number(node.outputs) else -1
            of_types[id(node.outputs)] = types
        if types < 0 or not _may_be_shared(node, handles):
            continue
        inputs = tuple([moved.get(ref, ref) for ref in node.inputs]) if node.inputs else ()
        if inputs and node.op != "ReadVariableOp" and not scalars.issuperset(inputs):
            continue
        what = of_attrs.get(id(node.attrs))
        if what is None:
            what = of_attrs[id(node.attrs)] = _values(node.attrs, numbers)
        if what < 0:
            continue
        own = Ref(node.name)
        marks = None if node.marks is NO_MARKS else node.marks  # hashing marks takes long: they have many fields
        first = known.setdefault((node.op, node.scope, inputs, types, marks, what), own)
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
        inputs = node.inputs
        if not inputs:
            continue
        if node.op in UPDATES:
            found.update([name for name, _ in inputs])
        elif node.name in found and not node.stateful and len(node.outputs) == 1:
            whole = node.outputs[0]
            for name, index in inputs:
                if name not in found:
                    operand = nodes[name].outputs[index]
                    if operand.is_static and (
                        operand is whole or operand.shape == whole.shape or operand.elements == 1
                    ):
                        found.add(name)
    return found


def _is_number(types: tuple[TensorType, ...]) -> bool:
    """Returns True if a node with these outputs yields a single number."""
    if len(types) != 1:
        return False
    (kind,) = types
    return kind.is_static and kind.elements == 1 and kind.dtype not in UNMOVABLE


def is_shared_scalar(node: Node) -> bool:
    """Returns True if nodes like this one that have the same operands and wait for nothing yield the same number."""
    if not _is_number(node.outputs) or node.op in RANDOM:
        return False
    return node.op == "ReadVariableOp" or not node.stateful


def _may_be_shared(node: Node, handles: Mapping[str, Variable]) -> bool:
    """Returns True if what a node yields depends on its operands and attributes only, or if it reads a variable at the
    beginning of the step.
    """
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
