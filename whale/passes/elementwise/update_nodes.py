"""Creates the operation that updates variables (WhaleUpdate) from units of nodes, and reads such an operation again.

The arithmetic of a unit is written as the text of an update (whale_ops/core/compute/update_program.h). Units with equal
text become one operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from whale.ir.ops import ADDS, FUSED_UPDATE, IDENTITIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, require_static_shape
from whale.passes.elementwise.code import (
    BINARY,
    MOST_OF_A_KIND,
    UNARY,
    UNARY_OF_DOUBLES,
    Instructions,
    Value,
    place_instructions,
)
from whale.passes.elementwise.units import Accesses, Unit, is_row


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Represents one part of a WhaleUpdate operation: the update of one variable, or of several that have to be updated
    together.

    Attributes:
      unit: the nodes that the part replaces.
      does: what they compute, as text; parts with equal text join one operation.
    """

    unit: Unit
    does: Arithmetic


def find_part(program: Program, unit: Unit, found: Accesses) -> UpdatePart | None:
    """Describes the update that ``unit`` computes as a part of a WhaleUpdate operation, with its arithmetic written as
    text.

    Returns None if an op of the unit has no such text.

    Args:
      unit: nodes that together update variables of one shape.
      found: reads and writes of the program's variables.
    """
    ready = unit.nodes[0]
    does = _read_arithmetic(program, ready) if ready.op == FUSED_UPDATE else _write_arithmetic(program, unit, found)
    return None if does is None else UpdatePart(unit, does)


def _read_arithmetic(program: Program, node: Node) -> Arithmetic:
    """Returns the arithmetic of an update operation that has one part, from its attributes."""
    count, (shape,) = node.attrs["H"], node.attrs["shapes"]
    values = [node.inputs[count + place] for place in node.attrs["operands"]]
    whole = [program.find_type(ref).shape == shape.dims for ref in values]
    tensors = tuple([ref for ref, is_whole in zip(values, whole) if is_whole])
    scalars = tuple([ref for ref, is_whole in zip(values, whole) if not is_whole])
    handles = tuple([ref.node for ref in node.inputs[:count]])
    return Arithmetic(node.attrs["program"], handles, tensors, scalars, (), node.list_refs(), frozenset([node.name]))


def make_update(name: str, parts: Sequence[UpdatePart], nodes: Mapping[str, Node]) -> Node:
    """Creates the operation that runs several parts with the same arithmetic.

    Args:
      name: name of the operation.
      nodes: the nodes of the program, by name.
    """
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
        "operands": tuple([place[ref] for ref in operands]),
        "shapes": tuple([Shape(require_static_shape(part.unit.type)) for part in parts]),
        "H": len(handles),
        "N": len(values),
        "R": len(results),
    }
    scope = parts[0].unit.nodes[0].scope
    return Node(name, FUSED_UPDATE, (*handles, *values), tuple(controls), attrs, tuple(results), scope, stateful=True)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Represents the arithmetic of a unit as the text of an update, with its operands.

    Attributes:
      lines: the text; units with equal text can be fused.
      handles: handle nodes of the variables that it writes, in the order in which the text numbers them.
      tensors, scalars, rows: its other operands, numbered likewise.
      results: its values that other nodes read.
      replaced: names of the nodes that it replaces. Reads of variables that other nodes need are not replaced.
    """

    lines: tuple[str, ...]
    handles: tuple[str, ...]
    tensors: tuple[Ref, ...]
    scalars: tuple[Ref, ...]
    rows: tuple[Ref, ...]
    results: tuple[Ref, ...]
    replaced: frozenset[str]


def _write_arithmetic(program: Program, unit: Unit, found: Accesses) -> Arithmetic | None:
    """Writes the arithmetic of ``unit`` as text.

    Returns None if it needs too many operands, reads an intermediate value of a variable, or assigns one variable's old
    value to another.
    """
    reading = _UnitReader(program, unit, found)
    for node in unit.nodes:
        reading.take(node)
    final = {h: reading.values[h, version] for h, (_, version) in reading.written.items()}
    outputs = {ref.node for ref in program.outputs}
    kept = reading.list_kept_reads(outputs)
    if kept is None or any(value.kind == "o" and value.number != i for i, value in enumerate(final.values())):
        return None
    members, consumers = reading.names - kept, program.consumers
    results = [
        ref
        for ref in reading.computed
        if ref.node in outputs or not members.issuperset([c.name for c, _ in consumers.get(ref, ())])
    ]
    lines = place_instructions(
        tuple(reading.code.steps), tuple(final.values()), tuple([reading.computed[r] for r in results])
    )
    counts = (final, reading.tensors, reading.scalars, reading.rows, results)
    if lines is None or any(len(c) > MOST_OF_A_KIND for c in counts):
        return None
    operands = tuple(reading.tensors), tuple(reading.scalars), tuple(reading.rows)
    return Arithmetic(lines, tuple(final), *operands, tuple(results), frozenset(members))


class _UnitReader:
    """Converts a unit's nodes, one by one, to instructions."""

    def __init__(self, program: Program, unit: Unit, found: Accesses):
        self.program, self.unit, self.found = program, unit, found
        self.names = {n.name for n in unit.nodes}
        self.code = Instructions()
        self.tensors: dict[Ref, Value] = {}
        self.scalars: dict[Ref, Value] = {}
        self.rows: dict[Ref, Value] = {}
        self.computed: dict[Ref, Value] = {}
        self.external: set[str] = set()  # names of reads in the unit whose value is an operand of the operation
        # Handle -> versions of the variable before its first and after its last write in this unit.
        self.written: dict[str, tuple[int, int]] = {}
        self.values: dict[tuple[str, int], Value] = {}
        for node in unit.nodes:
            handle = found.handle.get(node.name)
            if handle is None or node.op == "ReadVariableOp":
                continue
            version = found.version[node.name]
            first, _ = self.written.setdefault(handle, (version - 1, version))
            self.written[handle] = first, version
            self.values.setdefault((handle, version - 1), Value("o", list(self.written).index(handle)))

    def take(self, node: Node) -> None:
        if node.op == "ReadVariableOp":
            return
        handle = self.found.handle.get(node.name)
        if handle is None:
            self.computed[Ref(node.name)] = self._compute(node, [self._find_operand(ref) for ref in node.inputs])
            return
        value = self._find_operand(node.inputs[1])
        version = self.found.version[node.name]
        if node.op in ADDS:
            op = "Add" if node.op == "AssignAddVariableOp" else "Sub"
            value = self.code.add(op, self.values[handle, version - 1], value)
        self.values[handle, version] = value

    def _compute(self, node: Node, operands: list[Value]) -> Value:
        if node.op in IDENTITIES:
            return operands[0]
        if node.op == "AddN":
            return self.code.add_sum(operands)
        op = BINARY.get(node.op) or UNARY.get(node.op) or UNARY_OF_DOUBLES[node.op]
        return self.code.add(op, *operands)

    def _find_operand(self, ref: Ref) -> Value:
        if ref in self.computed:
            return self.computed[ref]
        inside = self._find_written_value(ref)
        if inside is not None:
            return inside
        table, kind, given = self.tensors, "v", self.program.find_type(ref)
        if given.shape != self.unit.type.shape:
            is_long = is_row(given, self.unit.type)
            table, kind = (self.rows, "r") if is_long else (self.scalars, "s")
        if ref.node in self.names:
            self.external.add(ref.node)
        return table.setdefault(ref, Value(kind, len(table)))

    def _find_written_value(self, ref: Ref) -> Value | None:
        """Returns the value that a read sees of a variable that this unit writes; None if it is no read, or of another
        variable.
        """
        if self.program.by_name[ref.node].op != "ReadVariableOp":
            return None
        handle = self.found.handle.get(ref.node, "")
        return self.values.get((handle, self.found.version.get(ref.node, -1)))

    def list_kept_reads(self, outputs: Collection[str]) -> set[str] | None:
        """Returns the names of the unit's reads that stay nodes, since others need them; None if one of them reads an
        intermediate value, which is never stored.

        Args:
          outputs: names of nodes whose results the program returns.
        """
        kept: set[str] = set()
        for node in self.unit.nodes:
            if node.op != "ReadVariableOp":
                continue
            readers = [c.name for c, _ in self.program.consumers.get(Ref(node.name), ())]
            elsewhere = node.name in outputs or not self.names.issuperset(readers)
            if node.name not in self.external and not elsewhere:
                continue
            handle = self.found.handle[node.name]
            if handle in self.written and self.found.version[node.name] not in self.written[handle]:
                return None
            kept.add(node.name)
        return kept
