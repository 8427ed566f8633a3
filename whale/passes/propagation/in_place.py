"""Computes only the needed part of tensors that depend on shapes alone: broadcast gradients, masks, zeros of a batch.

Propagation goes forward, so a Tile, Fill or BroadcastTo of replicated operands has a replicated result, which its
readers slice. If all readers slice it alike, this pass computes just the slice: neither way communicates, but work is
not doubled.
"""

from __future__ import annotations

from whale.ir.layout import B, Replicate, Shard
from whale.ir.program import Program, Ref
from whale.ir.values import UNMOVABLE
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view


def make_in_place(program: Program, layout: GraphLayout, parts: int) -> GraphLayout:
    """Changes ``layout`` so that nodes computed from shapes alone produce the split that all their readers want."""
    strategies, produced = dict(layout.strategies), dict(layout.produced)
    fetched = set(program.outputs)
    for node in program.nodes:
        rule = find_rule(node.op)
        if len(node.outputs) != 1 or rule is None or not getattr(rule, "produces_any", False):
            continue
        ref = Ref(node.name)
        if node.outputs[0].dtype in UNMOVABLE or not isinstance(produced[ref], Replicate) or ref in fetched:
            continue
        wanted = {strategies[reader.name].inputs[i] for reader, i in program.consumers.get(ref, ())}
        target = next(iter(wanted)) if len(wanted) == 1 else B
        if not isinstance(target, Shard):
            continue
        op, current = make_op_view(program, node, parts), strategies[node.name].inputs
        for option in rule.strategies(op, current, (target,)):
            if option.outputs == (target,) and option.inputs == current:
                strategies[node.name] = option
                produced[ref] = target
                break
    return GraphLayout(strategies, produced, layout.preferred, layout.outputs, layout.unruled)
