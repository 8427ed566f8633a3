"""Tells whether a coordinate of an axis runs the same program as the first one, but for values."""

from __future__ import annotations

from whale.ir.layout import Partial, PerRank, Placement, RankZero, Replicate, Shard
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.sharding_rules import find_rule
from whale.sharding_rules.nn.attention import RINGS


def is_surely_identical(program: Program, plan: Plan) -> bool:
    """Tells, from the plan alone, whether ``partition_for_rank`` gives every coordinate the same nodes and types.

    That is the case if all have equally large parts of every tensor, and none has nodes of its own. Where the plan
    does not settle it, the lowered programs are compared (``is_alike``).

    Args:
      program: the expanded one that ``plan`` is of.
    """
    placements: set[Placement] = set()
    for graph, strategies in plan.strategies.items():
        for node in (program.functions[graph] if graph else program).nodes:
            strategy = strategies[node.name]
            rule = find_rule(node.op)
            streams = rule is not None and rule.local_stream and any(isinstance(p, Shard) for p in strategy.outputs)
            if strategy.once or streams or node.op in RINGS:
                return False
            placements.update(strategy.inputs, strategy.outputs)
    for r in plan.reshards:
        placements.update((r.source, r.target))
        added = isinstance(r.source, Replicate) and isinstance(r.target, Partial)  # the first one's, and zeros
        if added or (isinstance(r.source, Shard) and isinstance(r.target, Shard) and r.source.dim == r.target.dim):
            return False
    return all(_is_even(p) for p in placements)


def _is_even(p: Placement) -> bool:
    if isinstance(p, Shard):
        return p.smallest == p.largest and p.without_halo is p
    return not isinstance(p, (RankZero, PerRank))


def is_alike(one: Program, other: Program) -> bool:
    """Tells whether the programs of two coordinates differ in values only, not in their nodes or types."""
    if one.functions.keys() != other.functions.keys() or len(one.nodes) != len(other.nodes):
        return False
    if [v.type for v in one.variables] != [v.type for v in other.variables]:
        return False  # cut unevenly over an earlier axis
    same = all(
        a.name == b.name
        and a.op == b.op
        and a.inputs == b.inputs
        and a.controls == b.controls
        and a.outputs == b.outputs
        and a.scope == b.scope
        for a, b in zip(one.nodes, other.nodes)
    )
    return same and one.outputs == other.outputs and all(
        is_alike(body, other.functions[name]) for name, body in one.functions.items()
    )  # fmt: skip
