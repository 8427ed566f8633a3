"""Lets large variables be updated in place, by making updates wait for all readers of the old value.

A kernel that updates a variable whose value is still referenced writes to new memory: a copy of a weight, for
as long as the gradient of the preceding layer is computed.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush

from whale.ir.ops import ALIASES, UPDATES
from whale.ir.program import Node, Program, sort_nodes
from whale.passes.elementwise.units import LARGE_BYTES


def order_in_place_updates(program: Program) -> Program:
    """Makes updates of large variables in one rank's program wait for all readers of the old values.

    Nodes that need an update's result may read the old value, too; the update cannot wait for these.
    """
    large = {v.node for v in program.variables if v.type.bytes >= LARGE_BYTES}
    updates = [n for n in program.nodes if n.op in UPDATES and any(ref.node in large for ref in n.inputs)]
    if not updates:
        return program
    read = _find_readers(program, large)
    order = _order_updates_late(program, {node.name for node in updates})
    place = {node.name: i for i, node in enumerate(order)}
    nodes = {node.name: node for node in order}
    for node in updates:
        waits = {ref.node for ref in node.inputs}.union(node.controls)
        before = dict.fromkeys(r for ref in node.inputs for r in read.get(ref.node, ()) if r not in waits)
        ahead = [name for name in before if place[name] < place[node.name]]
        nodes[node.name] = replace(node, controls=(*node.controls, *ahead))
    return program.replace_nodes(sort_nodes(nodes))


def _find_readers(program: Program, large: set[str]) -> dict[str, list[str]]:
    """Returns, for each variable, the nodes that read its value, in the order of the program."""
    of: dict[str, str] = {}  # node whose output is a variable's value -> the variable
    found: dict[str, list[str]] = {}
    for node in program.nodes:
        variables = dict.fromkeys(of[ref.node] for ref in node.inputs if ref.node in of)
        if node.op == "ReadVariableOp" and node.inputs and node.inputs[0].node in large:
            of[node.name] = node.inputs[0].node
        elif node.op in ALIASES and len(variables) == 1 and node.inputs[0].node in of:
            of[node.name] = of[node.inputs[0].node]
        for variable in variables:
            found.setdefault(variable, []).append(node.name)
    return found


def _order_updates_late(program: Program, updates: set[str]) -> list[Node]:
    """Orders the nodes so that each update comes after all nodes that do not depend on an update."""
    place = {node.name: i for i, node in enumerate(program.nodes)}
    waits_for = {n.name: dict.fromkeys([*(r.node for r in n.inputs), *n.controls]) for n in program.nodes}
    after: dict[str, list[str]] = {}
    for name, others in waits_for.items():
        for other in others:
            after.setdefault(other, []).append(name)
    missing = {name: len(others) for name, others in waits_for.items()}
    ready = [(name in updates, place[name], name) for name, count in missing.items() if not count]
    heapify(ready)
    order: list[Node] = []
    while ready:
        *_, done = heappop(ready)
        order.append(program.by_name[done])
        for name in after.get(done, ()):
            missing[name] -= 1
            if not missing[name]:
                heappush(ready, (name in updates, place[name], name))
    return order
