"""Fuses updates of variables, and orders them within a step, in a rank's program.

* ``fuse_updates``: units with the same arithmetic become one operation, WhaleUpdate, which updates all their variables.
  Large variables are updated in place, since updates wait for all readers of the old value: a kernel that updates a
  variable whose value is still referenced writes to new memory, a copy of a weight for as long as the gradient of the
  preceding layer is computed.
* ``fuse_scatters``: sums of rows into tables, by their numbers, become few operations, WhaleScatterRows. What
  optimizers do with gradients of looked-up rows is an addition to the rows of a table each. TensorFlow's kernel takes
  some 150 ns for a row of 16 numbers, this one 10 to 20, and there is one operation for many tables.
* ``order_updates_last``: updates wait for all exchanges of a step, so that a rank takes a step completely, or changes
  nothing.

Decisions: 0088, 0177.
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
    find_units,
    list_predecessors,
    replace_by_operations,
)
from whale.passes.elementwise.update_nodes import Arithmetic, UpdatePart, find_part, make_update

UPDATE = FUSED_UPDATE

# Most bytes of the variables that one operation updates: what it reads is held until it has run, and it waits for all
# of that.
_GROUP_BYTES = 4 << 20
_EXCHANGED = "whale/exchanged"
_MEETS = EXCHANGES | {"WhaleCheck", "WhaleBarrier"}
_SUBTRACTS = {"ResourceScatterAdd": False, "ResourceScatterSub": True}


def fuse_updates(program: Program, choices: Choices = ALL) -> Program:
    """Fuses the updates of one rank's own graph into as few operations as possible; large ones are in place."""
    return order_in_place_updates(_fuse_updates_in_graph(program, choices))


def list_updates(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_updates`` makes, each with the names of the nodes that it replaces."""
    operations = _find_operations(program)
    made = [make_update(f"{UPDATE}/{i}", parts, program.by_name) for i, parts in enumerate(operations)]
    return [(node, [n for p in parts for n in sorted(p.does.replaced)]) for node, parts in zip(made, operations)]


def _fuse_updates_in_graph(program: Program, choices: Choices) -> Program:
    operations = _find_operations(program)
    return _replace_nodes(program, operations, choices) if operations else program


def _find_operations(program: Program) -> list[list[UpdatePart]]:
    """Returns the parts of the operations that are worth making."""
    found = find_accesses(program)
    units = find_units(program, found)
    groups: dict[tuple[object, ...], list[UpdatePart]] = {}
    for unit in units:
        part = find_part(program, unit, found)
        if part is not None:
            key = (unit.level, unit.type.dtype, part.does.lines, _find_exchange(program, part.does))
            groups.setdefault(key, []).append(part)
    operations = [
        part for parts in groups.values() for part in group_by_bytes(parts, lambda p: p.unit.type.bytes, _GROUP_BYTES)
    ]
    return [parts for parts in operations if sum(len(p.does.replaced) for p in parts) > 1]


def count_written_together(program: Program) -> tuple[int, int]:
    """Counts the operations of ``fuse_updates`` that update variables together, and the variables that they write."""
    written = [node.attrs["H"] for node in program.nodes if node.op == UPDATE]
    return len(written), sum(written)


def _find_exchange(program: Program, does: Arithmetic) -> str:
    """Returns the name of the exchange that provides the operand of an update; "": none.

    The update starts when that has ended, and waits for no other exchange.
    """
    from_ranks = [ref.node for ref in does.tensors if program.by_name[ref.node].op in EXCHANGES]
    return from_ranks[-1] if from_ranks else ""


def _replace_nodes(program: Program, operations: list[list[UpdatePart]], choices: Choices) -> Program:
    """Puts an operation in place of each list of nodes, at the position of the last one."""
    moved: dict[Ref, Ref] = {}
    made: dict[str, Node] = {}  # node that is replaced -> what stands for it
    for i, parts in enumerate(operations):
        node = make_update(f"{UPDATE}/{i}", parts, program.by_name)
        if not choices.takes("updates", program, node):
            continue
        made.update({name: node for part in parts for name in part.does.replaced})
        results = [ref for part in parts for ref in part.does.results]
        moved.update({ref: Ref(node.name, k) for k, ref in enumerate(results)})
    return replace_by_operations(program, made, moved)


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


def order_updates_last(program: Program) -> Program:
    """Makes the updates of one rank's program wait for its exchanges, except for updates on which exchanges depend."""
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
    """Returns a rank program's variables (their nodes) that are written before all its exchanges have ended."""
    meeting = [node.name for node in program.nodes if _runs_any_of(node, program, _MEETS)]
    early = _find_predecessors(program, meeting).union(meeting)
    writing = [node for node in program.nodes if node.name in early and _is_update(node, program)]
    written = dict.fromkeys(ref.node for node in writing for ref in node.inputs)
    return tuple(node for node in written if node in program.variable_of)


def _is_update(node: Node, program: Program) -> bool:
    return _runs_any_of(node, program, UPDATES)


def _runs_any_of(node: Node, program: Program, ops: frozenset[str]) -> bool:
    """Tells whether a node is one of ``ops``, or runs a function with one."""
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
    """Returns all predecessors of these nodes; the nodes themselves only if another one of them depends on them."""
    nodes = [program.by_name[name] for name in names]
    return find_waited_for(
        program, [name for node in nodes for name in (*(ref.node for ref in node.inputs), *node.controls)]
    )


def fuse_scatters(program: Program, choices: Choices = ALL) -> Program:
    """Fuses sums of rows into tables, in one rank's program and its functions, into few operations."""
    return change_other_graphs(program, lambda graph: _fuse_scatters_in_graph(graph, choices))


def list_scatters(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_scatters`` makes, each with the names of the nodes that it replaces."""
    return [(_make_operation(nodes), [node.name for node in nodes]) for nodes in _find_groups(program)]


def _fuse_scatters_in_graph(program: Program, choices: Choices) -> Program:
    made: dict[str, Node] = {}
    for nodes in _find_groups(program):
        operation = _make_operation(nodes)
        if choices.takes("updates", program, operation):
            made.update({node.name: operation for node in nodes})
    return replace_by_operations(program, made, {})


def _find_groups(program: Program) -> list[list[Node]]:
    """Groups the nodes that become one operation: none waits for another, they wait for the same exchange, and each
    changes another table.
    """
    if program.ops.isdisjoint(_SUBTRACTS):
        return []
    nodes = [node for node in program.nodes if _is_fusable(program, node)]
    if not nodes:
        return []
    levels = _find_levels(program, {node.name for node in nodes})
    turns: dict[tuple[object, ...], int] = {}  # how often a table was met
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        table, ids, rows = node.inputs
        exchange = rows.node if program.by_name[rows.node].op in EXCHANGES else ""
        types = program.find_type(ids).dtype, program.find_type(rows).dtype
        key = (levels[node.name], node.op, exchange, node.scope, *types)
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
    """Returns, for each node, the number of nodes of ``names`` on the longest path to it."""
    levels: dict[str, int] = {}
    for node in program.nodes:
        levels[node.name] = max((levels[n] + (n in names) for n in list_predecessors(node)), default=0)
    return levels


def _make_operation(nodes: list[Node]) -> Node:
    """Returns the operation that replaces ``nodes``, whose tables differ."""
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
