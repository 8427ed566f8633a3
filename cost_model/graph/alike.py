"""Finds ranks whose programs take as long and hold as much as another rank's, so that one of them is simulated."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.graph.machine import Machine
from cost_model.graph.traffic import exchange
from whale.ir.ops import EXCHANGES
from whale.ir.program import Program


def find_alike(programs: Sequence[Program]) -> list[int]:
    """Returns for each program the number of the first one that has the same operations, but for values of constants.

    Programs with loops or branches, whose turns constants may decide, are alike only if they are the same.
    """
    found: list[int] = []
    for number, program in enumerate(programs):
        firsts = (first for first in dict.fromkeys(found) if _are_alike(programs[first], program))
        found.append(next(firsts, number))
    return found


def _are_alike(one: Program, other: Program) -> bool:
    if one is other:
        return True
    if one.functions or other.functions or len(one.nodes) != len(other.nodes):
        return False
    if (one.inputs, one.outputs) != (other.inputs, other.outputs):
        return False
    if [(v.node, v.type) for v in one.variables] != [(v.node, v.type) for v in other.variables]:
        return False
    return all(
        a is b
        or (
            (a.op, a.name, a.inputs, a.controls, a.outputs, a.marks)
            == (b.op, b.name, b.inputs, b.controls, b.outputs, b.marks)
            and len(a.attrs.get("ranks", ())) == len(b.attrs.get("ranks", ()))
        )
        for a, b in zip(one.nodes, other.nodes)
    )


def find_simulated(programs: Sequence[Program], machine: Machine) -> list[int]:
    """Returns for each rank the one that is simulated for it: the first of equal ones that do the same.

    That needs ranks that share no cores, and exchanges among all of them: then equal ranks wait for the same.
    """
    size = len(programs)
    hosts = machine.sharing.hosts[:size]
    among_all = all(
        len(node.attrs.get("ranks", ())) in (0, size) for one in programs for node in one.nodes if node.op in EXCHANGES
    )
    if len(set(hosts)) < size or not among_all:
        return list(range(size))
    alike = find_alike(programs)
    first: dict[tuple[int, int], int] = {}
    return [first.setdefault((alike[r], id(machine.operations[r])), r) for r in range(size)]


def count_logical_bytes(program: Program, rank: int, size: int) -> int:
    """Returns a rank's part of the bytes that the exchanges of a program without functions have to move."""
    return sum(
        exchange(node, [program.find_type(ref) for ref in node.inputs], rank, size).logical_bytes
        for node in program.nodes
        if node.op in EXCHANGES
    )
