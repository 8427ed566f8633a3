"""Fuses updates of variables, and orders them within a step, in one rank's program.

* ``fuse_updates``: updates with the same arithmetic become one operation, WhaleUpdate, which updates all their
  variables. Large variables are updated in place: their updates wait for all readers of the old value. A kernel that
  updates a variable whose value is still referenced writes to new memory, and a copy of the weight would exist while
  the gradient of the preceding layer is computed.
* ``fuse_scatters``: scatter-adds of rows into tables become few operations, WhaleScatterRows. Optimizers add gradients
  of looked-up rows to the rows of each table. TensorFlow's kernel takes some 150 ns for a row of 16 numbers, Whale's 10
  to 20, and one operation serves many tables.
* ``order_updates_last``: updates wait for all communication of a step, so that a rank takes a step completely, or
  changes nothing.

Decisions: 0088, 0177, 0212.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush

from whale.ir.ops import ALIASES, EXCHANGES, FUSED_UPDATE, SCATTER_ROWS, UPDATES
from whale.ir.program import COMPILED, Node, Program, Ref, find_waited_for, iterate_function_refs, sort_nodes
from whale.ir.values import DType, group_by_bytes
from whale.kernels.choices import ALL, Choices
from whale.kernels.xla import change_other_graphs
from whale.passes.elementwise.units import (
    LARGE_BYTES,
    find_accesses,
    find_bounds,
    find_units,
    list_predecessors,
    replace_by_operations,
)
from whale.passes.elementwise.update_nodes import Arithmetic, UpdatePart, find_part, make_update

UPDATE = FUSED_UPDATE

# Most bytes of the variables that one operation updates. The operation waits for all its gradients, and these are held
# in memory until it has run.
_GROUP_BYTES = 4 << 20
_EXCHANGED = "whale/exchanged"
_MEETS = EXCHANGES | {"WhaleCheck", "WhaleBarrier"}
_SUBTRACTS = {"ResourceScatterAdd": False, "ResourceScatterSub": True}


def fuse_updates(program: Program, choices: Choices = ALL) -> Program:
    """Fuses the updates in the main graph of one rank's program into as few operations as possible, and makes large
    ones run in place.
    """
    return order_in_place_updates(_fuse_updates_in_graph(program, choices))


def list_updates(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_updates`` would create, each with the names of the nodes that it replaces."""
    operations = _find_operations(program)
    made = [make_update(f"{UPDATE}/{i}", parts, program.by_name) for i, parts in enumerate(operations)]
    return [(node, [n for p in parts for n in sorted(p.does.replaced)]) for node, parts in zip(made, operations)]


def _fuse_updates_in_graph(program: Program, choices: Choices) -> Program:
    operations = _find_operations(program)
    return _replace_nodes(program, operations, choices) if operations else program


def _find_operations(program: Program) -> list[list[UpdatePart]]:
    """Returns groups of update parts, each of which becomes one operation; groups that would replace a single node are
    left out.
    """
    found = find_accesses(program)
    units = find_units(program, found)
    groups: dict[tuple[object, ...], list[UpdatePart]] = {}
    for unit in units:
        part = find_part(program, unit, found)
        if part is not None:
            key = (unit.level, unit.bounds, unit.type.dtype, part.does.lines, _find_exchange(program, part.does))
            groups.setdefault(key, []).append(part)
    operations = [
        part for parts in groups.values() for part in group_by_bytes(parts, lambda p: p.unit.type.bytes, _GROUP_BYTES)
    ]
    return [parts for parts in operations if sum(len(p.does.replaced) for p in parts) > 1]


def count_written_together(program: Program) -> tuple[int, int]:
    """Counts the fused update operations of a program, and the variables that they write."""
    written = [node.attrs["H"] for node in program.nodes if node.op == UPDATE]
    return len(written), sum(written)


def _find_exchange(program: Program, does: Arithmetic) -> str:
    """Returns the name of the communication op that yields an operand (the gradient) of an update; "" if there is none.

    Only updates with equal names are fused: the fused operation then starts as soon as this communication has ended,
    and waits for no other.

    Args:
      does: the arithmetic of the update, which lists its operands.
    """
    from_ranks = [ref.node for ref in does.tensors if program.by_name[ref.node].op in EXCHANGES]
    return from_ranks[-1] if from_ranks else ""


def _replace_nodes(program: Program, operations: list[list[UpdatePart]], choices: Choices) -> Program:
    """Replaces the nodes of each group by one operation, at the position of the last node."""
    moved: dict[Ref, Ref] = {}
    made: dict[str, Node] = {}  # replaced node -> the operation
    for i, parts in enumerate(operations):
        node = make_update(f"{UPDATE}/{i}", parts, program.by_name)
        if not choices.takes("updates", program, node):
            continue
        made.update({name: node for part in parts for name in part.does.replaced})
        results = [ref for part in parts for ref in part.does.results]
        moved.update({ref: Ref(node.name, k) for k, ref in enumerate(results)})
    return replace_by_operations(program, made, moved)


def order_in_place_updates(program: Program) -> Program:
    """Makes updates of large variables, in one rank's program, wait for all readers of the old values.

    An update does not wait for readers that depend on its own result, on this rank or, as they may, through others.
    """
    large = {v.node for v in program.variables if v.type.bytes >= LARGE_BYTES}
    updates = [n for n in program.nodes if n.op in UPDATES and any(ref.node in large for ref in n.inputs)]
    if not updates:
        return program
    read, bounds = _find_readers(program, large), find_bounds(program)
    order = _order_updates_late(program, {node.name for node in updates})
    place = {node.name: i for i, node in enumerate(order)}
    nodes = {node.name: node for node in order}
    for node in updates:
        waits = {ref.node for ref in node.inputs}.union(node.controls)
        before = dict.fromkeys(r for ref in node.inputs for r in read.get(ref.node, ()) if r not in waits)
        ahead = [name for name in before if place[name] < place[node.name] and bounds.allow(name, node.name)]
        nodes[node.name] = replace(node, controls=(*node.controls, *ahead))
    return program.replace_nodes(sort_nodes(nodes))


def _find_readers(program: Program, large: set[str]) -> dict[str, list[str]]:
    """Maps each large variable to the nodes that read its value, also through views, in the program's order."""
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
    nodes, count = program.nodes, len(program.nodes)
    place = {node.name: i for i, node in enumerate(nodes)}
    after: list[list[int]] = [[] for _ in nodes]  # by the place of a node: those of the nodes that wait for it
    missing: list[int] = []
    for i, node in enumerate(nodes):
        before = {place[name] for name in list_predecessors(node)}
        missing.append(len(before))
        for other in before:
            after[other].append(i)
    # A node is in the heap with its place, an update with its place behind all others'.
    turn = [i + count * (node.name in updates) for i, node in enumerate(nodes)]
    ready = [turn[i] for i, waits in enumerate(missing) if not waits]
    heapify(ready)
    order: list[Node] = []
    while ready:
        done = heappop(ready) % count
        order.append(nodes[done])
        for i in after[done]:
            missing[i] -= 1
            if not missing[i]:
                heappush(ready, turn[i])
    return order


def order_updates_last(program: Program) -> Program:
    """Makes the updates of one rank's program wait for all its communication, except for updates on which communication
    depends.
    """
    meeting = [node.name for node in program.nodes if _runs_any_of(node, program, _MEETS)]
    if not meeting:
        return program
    early = _find_predecessors(program, meeting)
    late = {node.name for node in program.nodes if node.name not in early and _is_update(node, program)}
    late.difference_update(meeting)
    if not late:
        return program
    nodes = {node.name: node for node in program.nodes}
    for name in late:
        nodes[name] = replace(nodes[name], controls=(*nodes[name].controls, _EXCHANGED))
    nodes[_EXCHANGED] = Node(_EXCHANGED, "NoOp", controls=tuple(meeting))
    return program.replace_nodes(sort_nodes(nodes))


def list_early_writes(program: Program) -> tuple[str, ...]:
    """Returns the handle nodes of variables that a rank's program updates before all its communication has ended."""
    meeting = [node.name for node in program.nodes if _runs_any_of(node, program, _MEETS)]
    early = _find_predecessors(program, meeting).union(meeting)
    writing = [node for node in program.nodes if node.name in early and _is_update(node, program)]
    written = dict.fromkeys(ref.node for node in writing for ref in node.inputs)
    return tuple(node for node in written if node in program.variable_of)


def _is_update(node: Node, program: Program) -> bool:
    return _runs_any_of(node, program, UPDATES)


def _runs_any_of(node: Node, program: Program, ops: frozenset[str]) -> bool:
    """Returns True if the op of a node is in ``ops``, or the node runs a function with such a node."""
    if node.op in ops:
        return True
    bodies: Mapping[str, Program] = program.functions
    return any(
        _runs_any_of(inner, program, ops)
        for _, func in iterate_function_refs(node)
        for inner in _list_nodes(bodies.get(func.name))
    )


def _list_nodes(body: Program | None) -> tuple[Node, ...]:
    return () if body is None else body.nodes


def _find_predecessors(program: Program, names: list[str]) -> set[str]:
    """Returns the names of all nodes that the nodes ``names`` wait for, directly or through others.

    A node of ``names`` is in the result only if another one of them waits for it.
    """
    nodes = [program.by_name[name] for name in names]
    return find_waited_for(
        program, [name for node in nodes for name in (*(ref.node for ref in node.inputs), *node.controls)]
    )


def fuse_scatters(program: Program, choices: Choices = ALL) -> Program:
    """Fuses scatter-adds of rows into tables, in one rank's program and its functions, into few operations."""
    return change_other_graphs(program, lambda graph: _fuse_scatters_in_graph(graph, choices))


def list_scatters(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_scatters`` would create, each with the names of the nodes that it replaces."""
    return [(_make_operation(nodes), [node.name for node in nodes]) for nodes in _find_groups(program)]


def _fuse_scatters_in_graph(program: Program, choices: Choices) -> Program:
    made: dict[str, Node] = {}
    for nodes in _find_groups(program):
        operation = _make_operation(nodes)
        if choices.takes("updates", program, operation):
            made.update({node.name: operation for node in nodes})
    return replace_by_operations(program, made, {})


def _find_groups(program: Program) -> list[list[Node]]:
    """Groups the scatters that become one operation: none waits for another, their rows come from the same
    communication op, they may wait for the same exchanges, and each updates a different table.
    """
    if program.ops.isdisjoint(_SUBTRACTS):
        return []
    nodes = [node for node in program.nodes if _is_fusable(program, node)]
    if not nodes:
        return []
    names = {node.name for node in nodes}
    levels, bounds = _find_levels(program, names), find_bounds(program).join(program, names)
    turns: dict[tuple[object, ...], int] = {}  # number of scatters of the same table so far
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        table, ids, rows = node.inputs
        exchange = rows.node if program.by_name[rows.node].op in EXCHANGES else ""
        types = program.find_type(ids).dtype, program.find_type(rows).dtype
        key = (levels[node.name], bounds.get(node.name, 0), node.op, exchange, node.scope, *types)
        met = (table, *key)
        turns[met] = turn = turns.get(met, -1) + 1
        groups.setdefault((turn, *key), []).append(node)
    return [
        part
        for group in groups.values()
        for part in group_by_bytes(group, lambda node: program.find_type(node.inputs[2]).bytes, _GROUP_BYTES)
    ]


def _is_fusable(program: Program, node: Node) -> bool:
    if node.op not in _SUBTRACTS or node.attrs.get(COMPILED) or node.marks.on_host:
        return False
    variable = program.variable_of.get(node.inputs[0].node)
    if variable is None or variable.type.dtype not in ("float32", "float64") or not variable.type.shape:
        return False
    ids, rows = (program.find_type(ref) for ref in node.inputs[1:])
    if ids.dtype not in ("int32", "int64") or ids.shape is None or rows.shape is None or not ids.is_static:
        return False
    return rows.shape == (*ids.shape, *variable.type.shape[1:])


def _find_levels(program: Program, names: set[str]) -> Mapping[str, int]:
    """Returns for each node its level: the number of nodes of ``names`` on the longest path to it, without itself.

    Two of these nodes with equal levels do not wait for each other, and so can become one operation.
    """
    levels: dict[str, int] = {}
    for node in program.nodes:
        levels[node.name] = max((levels[n] + (n in names) for n in list_predecessors(node)), default=0)
    return levels


def _make_operation(nodes: list[Node]) -> Node:
    """Returns the WhaleScatterRows operation that replaces ``nodes``, each of which updates a different table."""
    names = {node.name for node in nodes}
    controls = dict.fromkeys(c for node in nodes for c in node.controls if c not in names)
    inputs: list[Ref] = [node.inputs[place] for place in range(3) for node in nodes]
    first = nodes[0]
    attrs = {
        "T": DType(first.attrs["dtype"]),
        "Tindices": DType(first.attrs["Tindices"]),
        "subtracts": _SUBTRACTS[first.op],
        "N": len(nodes),
    }
    return Node(
        f"{first.name}/{SCATTER_ROWS}", SCATTER_ROWS, tuple(inputs), tuple(controls), attrs, (), first.scope, True
    )
