"""Lets fetched reads of variables return the values after the run's updates."""

from __future__ import annotations

from dataclasses import replace

from whale.ir.ops import READS
from whale.ir.program import Node, Program, Ref


def read_last(program: Program) -> Program:
    """Returns ``program`` with every fetched read of a variable ordered after the run's updates of it.

    Without an order TensorFlow reads a resource variable before or after; a variable of version 1 by reference, after.
    A read that the script has put in an order keeps it, and so does what else reads the same node.
    """
    outputs = list(program.outputs)
    added: dict[str, Node] = {}
    for i, ref in enumerate(outputs):
        read = _find_read(program, ref)
        if read is None:
            continue
        updates = _list_updates(program, read)
        if updates:
            name = f"{read.name}/fetched"
            added[name] = replace(read, name=name, controls=tuple(updates))
            outputs[i] = Ref(name)
    if not added:
        return program
    return replace(program, nodes=(*program.nodes, *added.values()), outputs=tuple(outputs))


def _find_read(program: Program, ref: Ref) -> Node | None:
    """Returns the read of a variable that a fetched tensor is, if no control input orders it; else None."""
    node = program.by_name[ref.node]
    return node if node.op == "ReadVariableOp" and not node.controls else None


def _list_updates(program: Program, read: Node) -> list[str]:
    """Returns the names of the nodes that change what is read, or may."""
    users = program.consumers.get(read.inputs[0], ())
    return list(dict.fromkeys(node.name for node, _ in users if node.op not in READS))
