"""Fuses units with the same arithmetic into one operation, WhaleUpdate, which updates all their variables.

Decision: 0088.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whale.ir.ops import EXCHANGES, FUSED_UPDATE
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, group_by_bytes, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.elementwise.graph import replace_by_operations
from whale.kernels.updates.arithmetic import Arithmetic, write_arithmetic
from whale.kernels.updates.in_place import order_in_place_updates
from whale.kernels.updates.units import Unit, find_accesses, find_units

UPDATE = FUSED_UPDATE
# Most bytes of the variables that one operation updates: what it reads is held until it has run, and it waits for all
# of that.
GROUP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a fused operation for one variable (or several that have to be updated together)."""

    unit: Unit
    does: Arithmetic


def fuse_updates(program: Program, choices: Choices = ALL) -> Program:
    """Fuses the updates of one rank's own graph into as few operations as possible; large ones are in place."""
    return order_in_place_updates(_fuse_graph(program, choices))


def list_updates(program: Program) -> list[tuple[Node, list[str]]]:
    """Returns the operations that ``fuse_updates`` makes, each with the names of the nodes that it replaces."""
    operations = _find_operations(program)
    made = [_make_operation(f"{UPDATE}/{i}", parts, program.by_name) for i, parts in enumerate(operations)]
    return [(node, [n for p in parts for n in sorted(p.does.replaced)]) for node, parts in zip(made, operations)]


def _fuse_graph(program: Program, choices: Choices) -> Program:
    operations = _find_operations(program)
    return _replace_nodes(program, operations, choices) if operations else program


def _find_operations(program: Program) -> list[list[_Part]]:
    """Returns the parts of the operations that are worth making."""
    found = find_accesses(program)
    units = find_units(program, found)
    groups: dict[tuple[object, ...], list[_Part]] = {}
    for unit in units:
        does = write_arithmetic(program, unit, found)
        if does is not None:
            key = (unit.level, unit.type.dtype, does.lines, _find_exchange(program, does))
            groups.setdefault(key, []).append(_Part(unit, does))
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


def _replace_nodes(program: Program, operations: list[list[_Part]], choices: Choices) -> Program:
    """Puts an operation in place of each list of nodes, at the position of the last one."""
    moved: dict[Ref, Ref] = {}
    made: dict[str, Node] = {}  # node that is replaced -> what stands for it
    for i, parts in enumerate(operations):
        node = _make_operation(f"{UPDATE}/{i}", parts, program.by_name)
        if not choices.takes("updates", program, node):
            continue
        made.update({name: node for part in parts for name in part.does.replaced})
        results = [ref for part in parts for ref in part.does.results]
        moved.update({ref: Ref(node.name, k) for k, ref in enumerate(results)})
    return replace_by_operations(program, made, moved)


def _make_operation(name: str, parts: list[_Part], nodes: Mapping[str, Node]) -> Node:
    replaced = {name for part in parts for name in part.does.replaced}
    handles = [Ref(handle) for part in parts for handle in part.does.handles]
    operands = [ref for part in parts for ref in (*part.does.tensors, *part.does.scalars, *part.does.rows)]
    values = list(dict.fromkeys(operands))
    place = {ref: i for i, ref in enumerate(values)}
    results = [part.unit.type for part in parts for _ in part.does.results]
    controls = dict.fromkeys(c for one in sorted(replaced) for c in nodes[one].controls if c not in replaced)
    attrs = {
        "T": DType(parts[0].unit.type.dtype),
        "program": parts[0].does.lines,
        "operands": tuple(place[ref] for ref in operands),
        "shapes": tuple(Shape(require_static_shape(part.unit.type)) for part in parts),
        "H": len(handles),
        "N": len(values),
        "R": len(results),
    }
    scope = parts[0].unit.nodes[0].scope
    return Node(name, UPDATE, (*handles, *values), tuple(controls), attrs, tuple(results), scope, stateful=True)
