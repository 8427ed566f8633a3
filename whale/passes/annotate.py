"""Task graphs: every node ends in the scope of the forward node that it serves, found by structure.

Capture puts the scope on forward nodes and on gradient nodes whose forward op it saw. What is left here: updates join
the scope that reads their variable; any other node joins the scope of its first annotated operand, or else of its
readers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from whale.ir.plan import TaskGraph
from whale.ir.program import Program


def annotate(program: Program) -> Program:
    """``program`` with a scope on every node that can be related to an annotated one, and on its variables."""
    if not any(n.scope for n in program.nodes) and not any(v.scope for v in program.variables):
        return program
    scope = {n.name: n.scope for n in program.nodes}
    handles = program.variable_of
    of_variable: dict[str, str] = {v.node: v.scope for v in program.variables if v.scope}
    for node in program.nodes:
        if node.scope:
            for ref in node.inputs:
                if ref.node in handles:
                    of_variable.setdefault(ref.node, node.scope)
    for node in program.nodes:
        if not scope[node.name]:
            owned = [of_variable[r.node] for r in node.inputs if r.node in of_variable]
            near = owned or [scope[r.node] for r in node.inputs if scope[r.node]]
            if near:
                scope[node.name] = near[0]
    for node in reversed(program.nodes):
        if scope[node.name]:
            for ref in node.inputs:
                scope[ref.node] = scope[ref.node] or scope[node.name]
    nodes = tuple(n if n.scope == scope[n.name] else replace(n, scope=scope[n.name]) for n in program.nodes)
    variables = tuple(replace(v, scope=v.scope or of_variable.get(v.node, "")) for v in program.variables)
    return replace(program, nodes=nodes, variables=variables)


def task_graphs(program: Program, devices: tuple[int, ...]) -> tuple[TaskGraph, ...]:
    """One task graph per scope, in order of first appearance; nodes outside all scopes are in a default ``replica``."""
    counts: Counter[str] = Counter(n.scope for n in program.nodes)
    order = dict.fromkeys(n.scope for n in program.nodes)
    rows = []
    for path in order:
        kind = path.rsplit("/", 1)[-1].split("_")[0].split("(")[0] if path else "replica"
        rows.append(TaskGraph(path or "(default)", kind, devices, counts[path]))
    return tuple(rows)
