"""Makes updates wait for all exchanges of a step, so that a rank takes a step completely, or changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale.ir.ops import EXCHANGES, UPDATES
from whale.ir.program import Node, Program, find_waited_for, iterate_function_refs, sort_nodes

_EXCHANGED = "whale/exchanged"
_MEETS = EXCHANGES | {"WhaleCheck", "WhaleBarrier"}


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
