"""Fuses units with the same arithmetic into one operation, WhaleUpdate, which updates all their variables.

Decision: 0088.
"""

from __future__ import annotations

from whale.ir.ops import EXCHANGES, FUSED_UPDATE
from whale.ir.program import Node, Program, Ref
from whale.ir.values import group_by_bytes
from whale.kernels.choices import ALL, Choices
from whale.kernels.updates.in_place import order_in_place_updates
from whale.passes.elementwise.units import find_accesses, find_units, replace_by_operations
from whale.passes.elementwise.update_nodes import Arithmetic, UpdatePart, find_part, make_update

UPDATE = FUSED_UPDATE
# Most bytes of the variables that one operation updates: what it reads is held until it has run, and it waits for all
# of that.
GROUP_BYTES = 4 << 20


def fuse_updates(program: Program, choices: Choices = ALL) -> Program:
    """Fuses the updates of one rank's own graph into as few operations as possible; large ones are in place."""
    return order_in_place_updates(_fuse_graph(program, choices))


def list_updates(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_updates`` makes, each with the names of the nodes that it replaces."""
    operations = _find_operations(program)
    made = [make_update(f"{UPDATE}/{i}", parts, program.by_name) for i, parts in enumerate(operations)]
    return [(node, [n for p in parts for n in sorted(p.does.replaced)]) for node, parts in zip(made, operations)]


def _fuse_graph(program: Program, choices: Choices) -> Program:
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
        part for parts in groups.values() for part in group_by_bytes(parts, lambda p: p.unit.type.bytes, GROUP_BYTES)
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
