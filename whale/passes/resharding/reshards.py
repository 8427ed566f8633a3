"""Makes every change of layout explicit: one reshard per tensor and target placement.

``explicit_reshards`` lists them. ``make_in_place`` runs before, and saves work on tensors that depend on shapes alone
(broadcast gradients, masks, zeros of a batch). Propagation goes forward, so a Tile, Fill or BroadcastTo of replicated
operands has a replicated result, which its readers slice. If all readers take the same slice, only the slice is
computed: neither way communicates, but replicated work is avoided.
"""

from __future__ import annotations

from collections.abc import Mapping

from whale.ir.layout import (
    P_SUM,
    B,
    Partial,
    PerRank,
    Placement,
    Replicate,
    Shard,
    Strategy,
    count_moved_bytes,
    format_label,
)
from whale.ir.plan import Reshard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view
from whale.sharding_rules.nn.attention import RINGS, count_ring_bytes


def explicit_reshards(program: Program, layouts: Mapping[str, GraphLayout], parts: int) -> tuple[Reshard, ...]:
    """Lists all reshards of the program and its function bodies, in the order of the tensors' producers.

    A tensor that is wanted replicated and also in other placements is moved once, to be replicated; the other forms are
    sliced from it.
    """
    found: list[Reshard] = []
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        wanted: dict[Ref, dict[Placement, str]] = {}
        produced = layout.produced
        for node in body.nodes:
            for ref, placement in zip(node.inputs, layout.strategies[node.name].inputs):
                lies = produced[ref]
                if lies is not placement and lies != placement:
                    wanted.setdefault(ref, {}).setdefault(placement, node.name)
        for ref, placement in zip(body.outputs, layout.outputs):
            if placement != layout.produced[ref]:
                wanted.setdefault(ref, {}).setdefault(placement, "fetched" if graph == "" else "returned")
        read = {ref.node for ref in wanted}
        for node in body.nodes:
            for ref in node.list_refs() if node.name in read else ():
                if ref in wanted:
                    found.extend(reshards_of_tensor(graph, body, ref, layout.produced[ref], wanted[ref], parts))
            if node.op in RINGS:
                found.append(_round(graph, body, node, layout.strategies[node.name]))
    return tuple(found)


def reshards_of_tensor(
    graph: str, program: Program, ref: Ref, source: Placement, targets: Mapping[Placement, str], parts: int
) -> list[Reshard]:
    """Lists the reshards of one tensor, in the order in which they depend on each other.

    Args:
      graph: name of the function body that the tensor is in; "" is the program.
      source: the placement in which the tensor is produced.
      targets: wanted placement -> name of a reader, for the reshard's origin.
      parts: size of the mesh axis.
    """
    tensor = program.find_type(ref)
    per_rank = {t: why for t, why in targets.items() if type(t) is PerRank}
    if per_rank:
        # A per-rank value is made from each rank's own contribution, before anything is reduced.
        rest = {t: why for t, why in targets.items() if type(t) is not PerRank}
        rows = reshards_of_tensor(graph, program, ref, source, rest, parts) if rest else []
        return rows + [_row(graph, ref, source, t, 0, why) for t, why in per_rank.items()]
    if type(source) is PerRank:
        # As a global value, a per-rank one is a weighted sum over the ranks: make it partial first.
        first = _row(graph, ref, source, P_SUM, 0, next(iter(targets.values())))
        rest = {t: why for t, why in targets.items() if t != P_SUM}
        return [first] + (reshards_of_tensor(graph, program, ref, P_SUM, rest, parts) if rest else [])
    wide = {t: why for t, why in targets.items() if isinstance(t, Shard) and t is not t.without_halo}
    if wide:
        # With a halo: reshard to the split without halo first, then fetch the neighbours' indices.
        rest = {t: why for t, why in targets.items() if t not in wide}
        cut = type(source) is Replicate
        for t, why in wide.items():
            if not cut and t.without_halo != source:
                rest.setdefault(t.without_halo, why)
        rows = reshards_of_tensor(graph, program, ref, source, rest, parts) if rest else []
        for t, why in wide.items():
            start = source if cut else t.without_halo
            rows.append(_row(graph, ref, start, t, count_moved_bytes(start, t, tensor.bytes, parts), why))
        return rows
    whole = next((t for t in targets if type(t) is Replicate), None)
    if whole is None and (
        (isinstance(source, Partial) and any(isinstance(t, Partial) for t in targets))
        or (type(source) is not Replicate and len(targets) > 1)
    ):
        # Cheapest way to several forms, or from one reduction to another: replicate once, then slice at no cost.
        targets = {B: next(iter(targets.values())), **targets}
        whole = B
    rows = []
    for target in sorted(targets, key=lambda t: type(t) is not Replicate):
        start = whole if whole is not None and target != whole else source
        rows.append(
            _row(graph, ref, start, target, count_moved_bytes(start, target, tensor.bytes, parts), targets[target])
        )
    return rows


def _round(graph: str, program: Program, node: Node, strategy: Strategy) -> Reshard:
    """Returns the reshard of a ring attention: keys and values travel around the ring so that each rank sees all of
    them, and their placement is unchanged.
    """
    moved = count_ring_bytes(program, node, strategy)
    keys, placement = node.inputs[1], strategy.inputs[1]
    return Reshard(graph, keys, placement, placement, node.name, moved, origin=f"round the ranks, for {node.name}")


def _row(graph: str, ref: Ref, source: Placement, target: Placement, moved: int, why: str) -> Reshard:
    return Reshard(graph, ref, source, target, f"{graph}/{ref}>{format_label(target)}", moved, origin=f"for {why}")


def make_in_place(program: Program, layout: GraphLayout, parts: int) -> GraphLayout:
    """Returns ``layout`` with nodes computed from shapes alone (Tile, Fill, BroadcastTo) producing the split that all
    their readers want, instead of a replicated tensor.
    """
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
