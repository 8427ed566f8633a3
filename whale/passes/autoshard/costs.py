"""Computes the costs by which layouts under split scopes are chosen: the work of single nodes, and reshards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from whale.ir.layout import B, PerRank, Placement, RankZero, Replicate, Shard, Strategy
from whale.ir.program import Node, Ref
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.analysis.resharding_cost import LATENCY, change_cost, compute_cost, exchange_cost, fraction
from whale.passes.analysis.scopes import context_of
from whale.passes.autoshard.choose import TensorForms
from whale.passes.autoshard.region import SplitRegion
from whale.passes.autoshard.sequence import price_whole_activations, surcharge
from whale.passes.autoshard.tables import is_whole
from whale.sharding_rules import find_rule
from whale.sharding_rules.embedding import is_with_owners
from whale.sharding_rules.graph import make_op_view

_WHOLE_VARIABLE = 1e-3  # cost of a replicated variable: a tie-breaker, so that sharded is preferred at equal cost
_WORK = 0.01  # weight of work against communication: a tie-breaker among layouts that communicate the same


def node_costs(
    region: SplitRegion, sequences: Mapping[Ref, Shard], name: str, options: Sequence[Strategy],
    tables: Collection[str] = (),
) -> list[float]:  # fmt: skip
    """Returns the cost of each option of a node or variable, without reshards, in the unit of
    ``whale.passes.analysis.resharding_cost``.

    Args:
      sequences: wanted placements of activations between products; options that do not follow them cost more.
      name: name of the node, or the handle of the variable.
      tables: handles of embedding tables that may be whole on one rank; the latency of their exchanges is shared, since
        these are fused.
    """
    node = region.nodes.get(name)
    if node is None:
        return [0.0 if isinstance(o.outputs[0], Shard) else _WHOLE_VARIABLE for o in options]
    flops, touched = region.flops(node), region.count_touched_bytes(node)
    if any(region.communicates(r.node) for r in node.inputs):
        # A communication op over another mesh axis: each rank sends the part that it holds.
        return [touched * fraction(o.inputs + o.outputs) for o in options]
    rule, op = find_rule(node.op), make_op_view(region.program, node, region.parts)
    assert rule is not None, node
    reads = bool(node.outputs)
    together = len(tables) if any(r.node in tables for r in node.inputs) else 1
    found = [
        _WORK * _work(o, touched, flops, region.parts)
        + exchange_cost(rule.count_exchanged_bytes(op, o), region.parts, reads, together)
        for o in options
    ]
    if context_of(node.scope) is not None:
        found = [c + price_whole_activations(region.program, node, region.carriers, o) for c, o in zip(found, options)]
    if sequences:
        found = [c + surcharge(region.program, node, sequences, o) for c, o in zip(found, options)]
    return found


def _work(option: Strategy, touched: int, flops: int, parts: int) -> float:
    """Returns the cost of an option's work on the rank that has most to do.

    Of a table that is whole on one rank only a share, 1 / parts, counts: other tables keep the other ranks busy.

    Args:
      touched: bytes of the unsharded operands and results.
      flops: FLOPs of the whole node; 0 if it is no product or convolution.
      parts: number of ranks.
    """
    work = compute_cost(option, touched, flops)
    return work / parts if any(map(is_whole, option.inputs + option.outputs)) else work


def tensor_forms(
    region: SplitRegion, number: Mapping[str, int], options: Mapping[str, Sequence[Strategy]], together: int = 1
) -> list[TensorForms]:
    """Returns the tensors that nodes of the region produce or read, with their possible placements and the cost of
    changes.

    Args:
      number: node or handle -> its number in the choice.
      options: node or handle -> its candidate strategies.
      together: number of tables that may be whole on one rank: messages to and from them are fused and share latency.
    """
    found = []
    fetched = dict(zip(region.program.outputs, region.outside.outputs))
    for producer in region.program.nodes:
        chosen = options.get(producer.name)
        for ref in producer.list_refs():
            uses = [(r, i) for r, i in region.program.consumers.get(ref, ()) if chosen or r.name in options]
            if not uses and not (chosen and ref in fetched):
                continue
            if chosen is None and isinstance(region.outside.produced[ref], Replicate):
                if region.program.find_type(ref).dtype not in UNMOVABLE:
                    continue  # slicing a replicated tensor costs nothing
            forms = tuple(o.outputs[ref.index] for o in chosen) if chosen else (region.outside.produced[ref],)
            readers: list[tuple[int | None, tuple[Placement, ...]]] = []
            alike: set[tuple[Placement, Placement]] = set()  # changes that nodes outside make unnecessary
            for reader, i in uses:
                if reader.name in options:
                    readers.append((number[reader.name], tuple(o.inputs[i] for o in options[reader.name])))
                elif region.program.find_type(ref).dtype not in UNMOVABLE:
                    wanted = region.outside.strategies[reader.name].inputs[i]
                    readers.append((None, (B if isinstance(wanted, RankZero | PerRank) else wanted,)))
                    alike.update((form, wanted) for form in _rows_elsewhere(region, reader, i, forms))
            if chosen is None:
                wishes = [form for _, wanted in readers for form in wanted]
                alike.update((forms[0], form) for form in _rows_elsewhere(region, producer, None, wishes))
            if ref in fetched:
                readers.append((None, (fetched[ref],)))
            tensor = region.program.find_type(ref)
            owned = any(is_with_owners(producer, ref.index, form) for form in forms)
            price = partial(_price, tensor, owned, region.parts, region.unknown_rows, frozenset(alike), together)
            made_by = number[producer.name] if chosen else None
            found.append(TensorForms(forms, made_by, tuple(readers), price, (tensor, owned, frozenset(alike))))
    return found


def _rows_elsewhere(
    region: SplitRegion, node: Node, operand: int | None, forms: Sequence[Placement]
) -> frozenset[Placement]:
    """Returns those of ``forms`` that a lookup or update outside of the region can use without a reshard, since it
    exchanges rows with other ranks by their ids anyway.

    Args:
      node: the node outside of the region.
      operand: number of the operand that holds the rows; None: the node's result holds them.
      forms: the placements that the region may choose for the tensor with the rows.
    """
    rule, lies = find_rule(node.op), region.outside.strategies[node.name]
    op = make_op_view(region.program, node, region.parts)
    if rule is None or rule.routes is None or rule.routes.values != operand or not rule.is_exchanging_rows(op, lies):
        return frozenset()
    found = set[Placement]()
    for form in {*forms}:
        current = [form if i == operand else p for i, p in enumerate(lies.inputs)]
        wanted = [form] * len(lies.outputs) if operand is None else lies.outputs
        for way in rule.strategies(op, current, wanted) if isinstance(form, Shard) else ():
            if (
                rule.is_exchanging_rows(op, way)
                and (way.outputs[0] if operand is None else way.inputs[operand]) == form
            ):
                found.add(form)
    return frozenset(found)


def _price(
    tensor: TensorType, owned: bool, parts: int, unknown_rows: int, alike: Collection[tuple[Placement, Placement]],
    together: int, source: Placement, wanted: Placement,
) -> float:  # fmt: skip
    if source == wanted or (source, wanted) in alike:
        return 0.0
    if owned or tensor.dtype in UNMOVABLE:
        return math.inf
    cost = change_cost(tensor, source, wanted, parts, unknown_rows)
    if together > 1 and (is_whole(source) or is_whole(wanted)) and cost >= LATENCY and _is_of_parts(source, wanted):
        return cost - LATENCY * (1 - 1 / together)
    return cost


def _is_of_parts(source: Placement, wanted: Placement) -> bool:
    """Returns True if a reshard only changes the sizes of the parts along one split dimension."""
    return isinstance(source, Shard) and isinstance(wanted, Shard) and source.dim == wanted.dim
