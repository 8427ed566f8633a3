"""Explains why no part of a program is divided, so that every rank computes all of it, and how to change that."""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.layout import B, Placement, Shard, Strategy
from whale.ir.ops import ASKS_SHAPE, CONTRACTIONS, DATASET_LOOPS
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view

_READS = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})


def explain_undivided(program: Program, plan: Plan) -> str:
    """Explains why every rank computes all of a program that could be divided, and what to do; "" if it is divided.

    Args:
      program: expanded, as of the plan.
    """
    if plan.size == 1 or plan.stage_groups or plan.inner is not None or plan.split_flops:
        return ""
    ops = {node.op for body in (program, *program.functions.values()) for node in body.nodes}
    if ops.isdisjoint(CONTRACTIONS):  # the plan's FLOPs are without those of functions that datasets call
        return ""
    if "MakeIterator" in ops or ops & DATASET_LOOPS:
        why = "it loops over a dataset itself"
        next_step = "take the loop out of it: `for batch in wh.shard(dataset): step(batch)`"
    elif ops & _READS:
        why = "it reads its batches itself, from an iterator in a loop or a branch"
        next_step = "pass it a batch (`for batch in wh.shard(dataset): step(batch)`), or call next(iterator) in no loop"
    elif not plan.batch_inputs:
        why = "none of its arguments has rows"
        next_step = "pass it the batch as an argument, as a tensor whose dimension 0 has the rows"
    else:
        names, end = ", ".join(b.name for b in plan.batch_inputs), _find_end_of_rows(program, plan)
        why = f"what it makes of its batch ({names}) cannot be divided along the rows"
        next_step = "see where the rows end with `whale plan` and `whale explain`; name other inputs in batch.inputs"
        if end is not None:
            why = f"the rows of its batch ({names}) end at `{end.op}` ({end.name})"
            next_step = (
                "compute it in front of the step, or of each row by itself, with shapes that are known; or "
                "name other inputs in batch.inputs"
            )
    return f"every rank computes the whole program `{plan.program}`, since {why}; {next_step}"


def _find_end_of_rows(program: Program, plan: Plan) -> Node | None:
    """Returns the first operation behind which nothing follows the rows of the batch any more, though there are
    products to divide; None where there is no such one.
    """
    rows: dict[Ref, Placement] = {Ref(b.name, 0): b.placement for b in plan.batch_inputs}
    for node in program.nodes:
        taken = [rows.get(ref, B) for ref in node.inputs]
        if node.op in ASKS_SHAPE or all(placement is B for placement in taken):
            continue
        going_on = next(iter(_list_strategies(program, plan, node, taken)), None)
        if going_on is not None:
            kept = zip(node.list_refs(), going_on.outputs)
            rows.update({ref: placement for ref, placement in kept if isinstance(placement, Shard)})
        elif _leads_to_products(program, node):
            return node
    return None


def _list_strategies(program: Program, plan: Plan, node: Node, taken: list[Placement]) -> list[Strategy]:
    """Lists the strategies of a node that take its divided operands as they are."""
    rule = find_rule(node.op)
    if rule is None:
        return []
    try:
        options = rule.strategies(make_op_view(program, node, plan.size), taken)
    except PlanError:
        return []
    return [one for one in options if all(have is B or have == want for have, want in zip(taken, one.inputs))]


def _leads_to_products(program: Program, node: Node) -> bool:
    """Tells whether a product or convolution is computed of what a node gives, or by the node itself."""
    left, seen = [node], {node.name}
    while left:
        one = left.pop()
        if one.op in CONTRACTIONS:
            return True
        for ref in one.list_refs():
            readers = [reader for reader, _ in program.consumers.get(ref, ()) if reader.name not in seen]
            seen.update(reader.name for reader in readers)
            left += readers
    return False
