"""Makes one operation of each variable's update, in steps that update many variables, so that planning takes less time.

An optimizer of Keras 3 is some twenty operations for each variable, so that most nodes of a step with thousands of
variables are updates. They would be planned, lowered, compared and checked one by one, only to be fused at the end
(``whale.kernels.updates``). This pass turns the nodes of one variable's update, with its optimizer state, into one node
with the same arithmetic (``WhaleUpdate``). The node is planned like the optimizers' own operations
(``ResourceApplyAdam``): weight, state and gradient have the same layout, replicated or sharded. After planning, updates
with equal arithmetic are fused into one.

Decision: 0203.
"""

from __future__ import annotations

from whale.ir.marks import NO_MARKS
from whale.ir.ops import ASSIGNS
from whale.ir.program import Node, Program
from whale.ir.values import SharedAttrs
from whale.passes.analysis.stages import has_stages
from whale.passes.elementwise.units import Unit, find_accesses, find_units, replace_by_operations
from whale.passes.elementwise.update_nodes import find_part, make_update

MANY = 1024  # programs with fewer assignments keep them, so that the plan names each operation of an update


def collapse_updates(program: Program) -> Program:
    """Makes one operation of each variable's update, if there are ``MANY`` assignments or more.

    Left as they are: updates of which another node reads a value, updates of more than one gradient or over several
    scopes, and all updates of a program with pipeline stages.
    """
    if sum(node.op in ASSIGNS for node in program.nodes) < MANY or has_stages(program):
        return program
    found = find_accesses(program)
    made: dict[str, Node] = {}
    known: dict[object, SharedAttrs] = {}
    for unit in find_units(program, found):
        part = find_part(program, unit, found) if _may_collapse(unit) else None
        if part is None or part.does.results or part.does.rows or len(part.does.tensors) > 1:
            continue
        if len(part.does.replaced) < 2:
            continue
        last = next(n.name for n in reversed(unit.nodes) if n.op in ASSIGNS)
        node = make_update(f"{last}/whale_update", [part], program.by_name)
        shared = known.setdefault(tuple(node.attrs.values()), SharedAttrs(node.attrs))
        node = Node(node.name, node.op, node.inputs, node.controls, shared, (), node.scope, stateful=True)
        made.update((name, node) for name in part.does.replaced)
    return replace_by_operations(program, made, {})


def _may_collapse(unit: Unit) -> bool:
    first = unit.nodes[0]
    return all(node.scope == first.scope and node.marks is NO_MARKS for node in unit.nodes)
