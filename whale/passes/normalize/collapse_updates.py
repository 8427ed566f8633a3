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

from collections import Counter

from whale.ir.marks import NO_MARKS
from whale.ir.ops import ASSIGNS, CALLS, FUSED_UPDATE
from whale.ir.program import COMPILED, Node, Program, Ref
from whale.ir.values import SharedAttrs
from whale.passes.analysis.stages import has_stages
from whale.passes.elementwise.units import Accesses, Unit, find_accesses, find_units, replace_by_operations
from whale.passes.elementwise.update_nodes import find_part, make_update

MANY = 1024  # programs with fewer assignments keep them, so that the plan names each operation of an update


def collapse_updates(program: Program) -> Program:
    """Makes one operation of each variable's update, if there are ``MANY`` writes of variables or more.

    Left as they are: updates of which another node reads a value, updates of more than one gradient or of none (the
    decay of a weight, whose operation would have no operand that tells how its variable may be divided) or over several
    scopes, and all updates of a program with pipeline stages.
    """
    if sum(map(_count_writes, program.nodes)) < MANY or has_stages(program):
        return program
    return _collapse(program, find_accesses(program), {})


def collapse_called_updates(program: Program) -> Program:
    """Does the same in the functions that ``program`` calls, before these are inlined: a function that updates a
    variable is called for thousands of them, and is rewritten once.
    """
    calls = [node for node in program.nodes if node.op in CALLS and not node.attrs.get(COMPILED)]
    writes = {name: sum(map(_count_writes, body.nodes)) for name, body in program.functions.items()}
    called = Counter(node.attrs["f"].name for node in calls)
    if sum(writes.get(name, 0) * count for name, count in called.items()) < MANY or has_stages(program):
        return program
    # A function does not know that two of its handles are those of one variable.
    twice = {n.attrs["f"].name for n in calls if len(set(n.inputs)) < len(n.inputs)}
    known: dict[object, SharedAttrs] = {}
    functions = dict(program.functions)
    for name in called.keys() & functions.keys() - twice:
        body = functions[name]
        handles = [ref.node for ref in map(Ref, body.inputs) if body.find_type(ref).dtype == "resource"]
        functions[name] = _collapse(body, find_accesses(body, handles), known)
    return program.replace_nodes(program.nodes, functions=functions)


def _count_writes(node: Node) -> int:
    return int(node.attrs["H"]) if node.op == FUSED_UPDATE else int(node.op in ASSIGNS)


def _collapse(program: Program, found: Accesses, known: dict[object, SharedAttrs]) -> Program:
    """Makes one operation of each update of the program, or of one of its functions.

    Args:
      found: its accesses to variables.
      known: attributes that operations with the same arithmetic share; those of new ones are added.
    """
    made: dict[str, Node] = {}
    for unit in find_units(program, found, collapsed=False):
        if len(unit.nodes) < 2:
            continue
        part = find_part(program, unit, found) if _may_collapse(unit) else None
        if part is None or part.does.results or part.does.rows or len(part.does.tensors) != 1:
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
