"""Orders reads and updates of variables that TensorFlow 1 leaves in no order, so that all ranks read the same values.

A graph of version 1 has only those control edges that its author gave. A rank that reads a variable before an update
and a rank that reads it afterwards would decide differently, by a hook that looks at the step for example, and then run
different programs.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.ops import READS, UPDATES
from whale.ir.program import Node, Program, Ref, sort_nodes


def read_last(program: Program) -> Program:
    """Returns ``program`` with each fetched read of a variable placed after all updates of the variable in the run.

    Without a control edge, TensorFlow may read a resource variable before or after an update; a fetched reference
    variable was read after it. A read that has control inputs keeps its place, and so do other consumers of a read.
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
    """Returns the ReadVariableOp that outputs ``ref``; None if it is another op, or has control inputs."""
    node = program.by_name[ref.node]
    return node if node.op == "ReadVariableOp" and not node.controls else None


def _list_updates(program: Program, read: Node) -> list[str]:
    """Returns the names of the nodes that change, or may change, the variable that ``read`` reads."""
    users = program.consumers.get(read.inputs[0], ())
    return list(dict.fromkeys(node.name for node, _ in users if node.op not in READS))


def read_first(program: Program) -> Program:
    """Returns ``program`` with each update of a variable placed after all reads of it that have no control inputs and
    that nothing else places before or after the update: they yield the value from the beginning of the run.

    An assignment that is computed from no read of its variable, such as that of the initial value, keeps its place.
    """
    fetched = {r.node for r in program.outputs}
    of_handle: dict[Ref, list[str]] = {}
    for node in program.nodes:
        if node.op == "ReadVariableOp" and not node.controls:
            if node.name in fetched or Ref(node.name) in program.consumers:
                of_handle.setdefault(node.inputs[0], []).append(node.name)
    updates = {
        n.name: [r for ref in n.inputs for r in of_handle.get(ref, ())] for n in program.nodes if n.op in UPDATES
    }
    late = [name for name, own in updates.items() if not {*own} <= {*_list_direct(program.by_name[name])}]
    if not late:
        return program
    # A number for each node, of which bit i says that read i is before the node.
    bit = {name: 1 << i for i, name in enumerate(dict.fromkeys(r for u in late for r in updates[u]))}
    before: dict[str, int] = {}
    for node in program.nodes:
        found = bit.get(node.name, 0)
        for name in _list_direct(node):
            found |= before.get(name, 0)
        if found:
            before[node.name] = found
    waits: dict[str, list[str]] = {}
    for name in late:
        own, mask = updates[name], before.get(name, 0)
        if program.by_name[name].op == "AssignVariableOp" and not any(bit[r] & mask for r in own):
            continue
        waits[name] = [r for r in own if not bit[r] & mask]
    nodes = {
        n.name: replace(n, controls=(*n.controls, *waits[n.name])) if waits.get(n.name) else n for n in program.nodes
    }
    return program.replace_nodes(sort_nodes(nodes)) if any(waits.values()) else program


def _list_direct(node: Node) -> list[str]:
    return [*(r.node for r in node.inputs), *node.controls]
