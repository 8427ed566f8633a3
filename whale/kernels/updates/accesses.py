"""In which order a rank's program reads and writes its variables, and which value each read sees."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.ops import READS
from whale.ir.program import Node, Program


@dataclass(frozen=True, slots=True)
class Accesses:
    """Who touches which variable.

    A program orders what writes a variable and whatever else touches it, so the order of its nodes is one in which they
    may run, and a value of a variable is told by how many writes came before.

    Attributes:
      handle: node that reads or writes one variable -> the variable's handle node.
      version: the same nodes -> how many writes of the variable have happened when it has run.
      seen: handles that only such nodes and calls take, which hand them to nobody else.
    """

    handle: dict[str, str]
    version: dict[str, int]
    seen: frozenset[str]


def accesses(program: Program) -> Accesses:
    """Of the variables of ``program``'s own graph; a call that takes a handle counts as a write."""
    handles = dict.fromkeys((v.node for v in program.variables), 0)
    handle: dict[str, str] = {}
    version: dict[str, int] = {}
    leaked: set[str] = set()
    for node in program.nodes:
        taken = dict.fromkeys(ref.node for ref in node.inputs if ref.node in handles)
        if not taken:
            continue
        if any(t.dtype in ("resource", "variant") for t in node.outputs):
            leaked.update(taken)
        for name in taken:
            handles[name] += node.op not in READS
        first = next(iter(taken))
        if len(taken) == 1 and node.inputs[0].node == first:
            handle[node.name], version[node.name] = first, handles[first]
    return Accesses(handle, version, frozenset(handles.keys() - leaked - {*program.inputs}))


def is_read(node: Node, found: Accesses) -> bool:
    """Whether ``node`` yields the whole value of a variable that others may update together."""
    return node.op == "ReadVariableOp" and found.handle.get(node.name, "") in found.seen
