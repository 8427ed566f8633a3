"""Merges reads of a variable that return the same value.

TensorFlow 1 reads a variable again for every use. Where the variable is split between steps and gathered where it is
read, each of these reads would be an all-gather.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Program, Ref


def merge_reads(program: Program) -> Program:
    """Replaces reads of a variable's value from the beginning of the step by one ``ReadVariableOp``.

    Reads without control inputs return that value: a read behind a write waits for it. Reads in different scopes are
    not merged, since each belongs to a stage.
    """
    first: dict[tuple[Ref, str], str] = {}
    served: dict[str, str] = {}  # a reading -> the one that serves it
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
