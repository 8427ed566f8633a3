"""Fuses sums of rows into tables, by their numbers, into few operations: WhaleScatterRows.

What optimizers do with gradients of looked-up rows is an addition to the rows of a table each. TensorFlow's kernel
takes some 150 ns for a row of 16 numbers, this one 10 to 20, and there is one operation for many tables.

Decision: 0177.
"""

from __future__ import annotations

from collections.abc import Mapping

from whale.ir.ops import EXCHANGES, SCATTER_ROWS
from whale.ir.program import COMPILED, Node, Program, Ref
from whale.ir.values import DType, group_by_bytes
from whale.kernels.choices import ALL, Choices
from whale.kernels.updates.fuse import GROUP_BYTES
from whale.kernels.xla import change_other_graphs
from whale.passes.elementwise.units import list_predecessors, replace_by_operations

_SUBTRACTS = {"ResourceScatterAdd": False, "ResourceScatterSub": True}


def fuse_scatters(program: Program, choices: Choices = ALL) -> Program:
    """Fuses sums of rows into tables, in one rank's program and its functions, into few operations."""
    return change_other_graphs(program, lambda graph: _fuse_graph(graph, choices))


def list_scatters(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_scatters`` makes, each with the names of the nodes that it replaces."""
    return [(_make_operation(nodes), [node.name for node in nodes]) for nodes in _find_groups(program)]


def _fuse_graph(program: Program, choices: Choices) -> Program:
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
        for part in group_by_bytes(group, lambda node: program.find_type(node.inputs[2]).bytes, GROUP_BYTES)
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
