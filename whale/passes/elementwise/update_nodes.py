"""Makes the operation that updates variables by the same arithmetic (WhaleUpdate), and reads its parts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.ir.ops import FUSED_UPDATE
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, require_static_shape
from whale.passes.elementwise.arithmetic import Arithmetic, write_arithmetic
from whale.passes.elementwise.units import Accesses, Unit


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """The part of an operation for one variable (or several that have to be updated together)."""

    unit: Unit
    does: Arithmetic


def find_part(program: Program, unit: Unit, found: Accesses) -> UpdatePart | None:
    """Returns what an operation does in the place of a unit's nodes; None if no operation can do it."""
    ready = unit.nodes[0]
    does = _read_arithmetic(program, ready) if ready.op == FUSED_UPDATE else write_arithmetic(program, unit, found)
    return None if does is None else UpdatePart(unit, does)


def _read_arithmetic(program: Program, node: Node) -> Arithmetic:
    """Returns the arithmetic of an operation of one part."""
    count, (shape,) = node.attrs["H"], node.attrs["shapes"]
    values = [node.inputs[count + place] for place in node.attrs["operands"]]
    whole = [program.find_type(ref).shape == shape.dims for ref in values]
    tensors = tuple([ref for ref, is_whole in zip(values, whole) if is_whole])
    scalars = tuple([ref for ref, is_whole in zip(values, whole) if not is_whole])
    handles = tuple([ref.node for ref in node.inputs[:count]])
    return Arithmetic(node.attrs["program"], handles, tensors, scalars, (), node.list_refs(), frozenset([node.name]))


def make_update(name: str, parts: Sequence[UpdatePart], nodes: Mapping[str, Node]) -> Node:
    """Makes the operation of some parts, whose arithmetic is the same.

    Args:
      nodes: of the program, by name.
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
