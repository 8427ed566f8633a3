"""Refuses programs that update variables, or a process's tables, inside functions that the first rank alone runs.

Such updates are in functions that an op such as a dataset runs by itself, or in a loop or branch that only the first
rank runs. The other ranks' copies of the variable would keep their old value. Programs are accepted where a pass has
added nodes that assign the first rank's value on all ranks afterwards (``whale.passes.normalize.side_effects``).
"""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.ops import DATASET_LOOPS, HAS_BODIES, IDENTITIES, OBJECT_UPDATES, UPDATES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.passes.normalize.side_effects import find_hidden_updates
from whale.sharding_rules import find_rule

_LOOP = "take the loop over the dataset out of the step, and call the step once per batch"
_OPTIONAL = (
    "read the iterator by `for x in iterator:` or next(iterator), since what get_next_as_optional() returns cannot be "
    "sent to ranks that are threads; `whale run`, whose ranks are processes, runs the step as it is"
)
_STRINGS = (
    "take the update out of the loop or branch, or the strings, which cannot be sent to other ranks; strings of tables "
    "and queues are on all ranks that are processes (`whale run`)"
)
# Mostly met with a metric or layer that reads a dataset of candidates and numbers them in a variable.
_TRANSFORMATION = (
    "let the dataset number its elements itself (Dataset.enumerate(), or identifiers beside them, as in "
    "FactorizedTopK(Dataset.zip((ids, candidates)))), or compute what reads it outside of the step"
)


def refuse_hidden_updates(program: Program, plan: Plan) -> None:
    """Checks that every update of a variable is a node of the plan that all ranks run.

    Raises:
      PlanError: an op updates a variable inside a function that it runs by itself (as tf.data does for loops over a
        dataset), or inside a loop or branch that only the first rank runs.
    """
    if plan.size == 1 or not program.functions:
        return
    for graph, strategies in plan.strategies.items():
        body = program if graph == "" else program.functions[graph]
        shared = _list_shared(body)
        for node in body.nodes:
            control_flow = node.op in HAS_BODIES
            if control_flow and not strategies[node.name].once:
                continue  # its bodies are graphs of the plan
            if not control_flow and not (_runs_functions(node) and _takes_handles(body, node)):
                continue
            update = _update_inside(program, node, set())
            if update is not None and not _are_shared(program, body, node, shared):
                raise PlanError(
                    "what every rank has a copy of is updated by an operation that only the first rank runs",
                    op=f"{node.name} ({node.op})",
                    given=f"{update.name} ({update.op}) inside a function that this operation calls",
                    expected="updates in the step itself, or in loops and branches over tensors, datasets or iterators",
                    action=_find_action(body, node),
                )


def _list_shared(body: Program) -> set[str]:
    """Returns the handle nodes of variables that are assigned the first rank's value on all ranks."""
    reads = [body.by_name[node.inputs[0].node] for node in body.nodes if node.marks.of_first_rank]
    return {read.inputs[0].node for read in reads if read.op == "ReadVariableOp"}


def _are_shared(program: Program, body: Program, node: Node, shared: set[str]) -> bool:
    """Returns True if all variables that ``node`` updates inside its functions are in ``shared``.

    Only nodes of the program itself count: in the body of a loop or branch no pass shares such updates.
    """
    changed = find_hidden_updates(program, node).keys() if body is program else set()
    return bool(changed) and changed <= shared


def _find_action(body: Program, node: Node) -> str:
    datasets = any(body.find_type(ref).dtype == "variant" for ref in node.inputs)
    if node.op in HAS_BODIES:
        if any(_source_of(body, ref).op == "IteratorGetNextAsOptional" for ref in node.inputs):
            return _OPTIONAL
        return _LOOP if datasets else _STRINGS
    return _LOOP if node.op in DATASET_LOOPS else _TRANSFORMATION


def _source_of(body: Program, ref: Ref) -> Node:
    node = body.by_name[ref.node]
    return _source_of(body, node.inputs[0]) if node.op in IDENTITIES else node


def _runs_functions(node: Node) -> bool:
    """Returns True if an op may run functions that are not graphs of the plan: dataset loops, and ops without a
    sharding rule.
    """
    return node.op in DATASET_LOOPS or find_rule(node.op) is None


def _takes_handles(program: Program, node: Node) -> bool:
    return any(program.find_type(r).dtype in ("resource", "variant") for r in node.inputs)


def _update_inside(program: Program, node: Node, seen: set[str]) -> Node | None:
    for _, func in iterate_function_refs(node):
        body = program.functions.get(func.name)
        if body is None or func.name in seen:
            continue
        seen.add(func.name)
        for inner in body.nodes:
            if inner.op in UPDATES or (inner.op in OBJECT_UPDATES and inner.marks.on_every_rank):
                return inner
            found = _update_inside(program, inner, seen)
            if found is not None:
                return found
    return None
