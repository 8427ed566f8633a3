"""Sequence and context parallelism: activations are divided along the sequence.

Sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section
4.2) is about what lies between the products of a split scope: normalisations, residual sums and dropout work on parts
of the sequence. The sum behind a product becomes a reduce-scatter, and an all-gather stands before the next one: the
same bytes, one transfer more, so what is communicated does not ask for it.

Under context parallelism every layer is divided along the sequence, and weights are replicated. What a product that
reads a weight makes lies along the sequence, forward and backward; all between follows, since nothing has to move
there. Between the layers stands attention, whose scores need every key: the choice by what is communicated brings the
ranks heads for their parts of the sequence (Jacobs et al., "DeepSpeed Ulysses", 2023), and a surcharge keeps it from
bringing all keys and values to every rank, which moves no more among few ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from whale.errors import PlanError
from whale.ir.layout import B, Partial, Placement, Replicate, Shard, Strategy, find_multiple, shard
from whale.ir.ops import VIEWS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims, TensorType
from whale.passes.analysis.rank_groups import sizes_within
from whale.passes.analysis.resharding_cost import LATENCY
from whale.passes.analysis.scopes import context_of, sequence_of
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view

_REDUCTIONS = frozenset({"Sum", "Mean", "BiasAddGrad"})  # a normalisation's statistics, and gradients of its weights
_RANK = 3  # least rank of activations: batch and sequence in either order, features
_WHOLE = 4.0  # transfers of an activation; to divide it takes two at most


def along_sequence(
    program: Program, nodes: Mapping[str, Node], groups: Mapping[str, frozenset[int]], parts: int,
    weights: Collection[Dims], strategies: Mapping[str, Strategy],
) -> dict[Ref, Shard]:  # fmt: skip
    """Returns the placements of the activations between products, in the scopes that name a sequence.

    Args:
      nodes: those of split scopes, by name; ``groups``: the ranks that divide them.
      weights: shapes of the variables that products read. A tensor with features has as many as one of their
        dimensions; one of just such a shape is a weight, or its gradient.
      strategies: the choice by what is communicated; what it divides by features is no tensor between products.
    """
    widths = {size for shape in weights for size in shape}
    found: dict[Ref, Shard] = {}
    for name, node in nodes.items():
        at = sequence_of(node.scope)
        for ref in node.list_refs() if at is not None and node.op != "Transpose" else ():
            shape = program.find_type(ref).shape
            if shape is None or len(shape) != _RANK or shape[-1] not in widths or shape in weights:
                continue
            lies, size, group = strategies[name].outputs[ref.index], shape[at or 0], groups[name]
            if size is None or size < len(group) or (isinstance(lies, Shard) and lies.dim == _RANK - 1):
                continue
            found[ref] = shard(at or 0, sizes_within(size, group, parts))
    return found


def surcharge(program: Program, node: Node, wanted: Mapping[Ref, Shard], option: Strategy) -> float:
    """Returns the surcharge of an option that does not divide the sequence; a product may pass its partial sum on."""
    pairs = [
        *zip(node.list_refs(), option.outputs),
        *(zip(node.inputs, option.inputs) if node.op in _REDUCTIONS else ()),
    ]
    found = 0.0
    for ref, placement in pairs:
        if (along := wanted.get(ref)) is None or (isinstance(placement, Shard) and placement.dim == along.dim):
            continue
        if not (isinstance(placement, Partial) and node.op in VIEWS):
            found += _price_kept_whole(program.find_type(ref))
    return found


def _price_kept_whole(activation: TensorType) -> float:
    """Returns the surcharge of an activation that is not divided along its sequence: the cost of sending it several
    times.
    """
    return _WHOLE * (LATENCY + activation.bytes)


def check_sequences(
    program: Program, nodes: Iterable[Node], wanted: Mapping[Ref, Shard], strategies: Mapping[str, Strategy]
) -> None:
    """Raises PlanError where scopes name a sequence but no activation is divided along it.

    One scope that divides its sequence is enough: others are around a loss, or make the variables.
    """
    shapes: dict[str, None] = {}
    named: list[str] = []
    for node in nodes:
        if (at := sequence_of(node.scope)) is None:
            continue
        named.append(node.scope)
        for ref in node.list_refs():
            cut = strategies[node.name].outputs[ref.index]
            if ref in wanted and isinstance(cut, Shard) and cut.dim == at:
                return
            if len(shape := program.find_type(ref).shape or ()) == _RANK:
                shapes[f"{node.op} {list(shape)}"] = None
    if named:
        at = sequence_of(named[0])
        raise PlanError(
            "the layers under a split scope cannot be divided along their sequence",
            op=named[0],
            given=f"sequence={at}; " + (", ".join(list(shapes)[:4]) or "no tensor of rank 3"),
            expected=f"activations of rank 3 around products, with a part of dimension {at} for each rank",
            action="name the other dimension, leave sequence out, or use fewer ranks",
        )


def layers_in_context(products: Mapping[str, Node]) -> dict[str, int]:
    """Maps products and lookups that read weights under scopes that divide every layer to the divided dimension."""
    found = {name: context_of(node.scope) for name, node in products.items()}
    return {name: at for name, at in found.items() if at is not None}


def context_seeds(
    program: Program, layers: Mapping[str, int], read: Mapping[str, Sequence[tuple[int, str]]],
    groups: Mapping[str, frozenset[int]], parts: int,
) -> dict[Ref, Shard]:  # fmt: skip
    """Returns the activations around products under context parallelism with the placements they should have.

    For a flattened activation it is the tensor from before the reshape.

    Args:
      read: the operands of products that are weights, and the handles of these.
    """
    found: dict[Ref, Shard] = {}
    for name, at in layers.items():
        node = program.by_name[name]
        weights = {i for i, _ in read[name]}
        for ref in (*(r for i, r in enumerate(node.inputs) if i not in weights), *node.list_refs()):
            behind = _unflatten(program, ref)
            shape: Dims = program.find_type(behind).shape or ()
            size = shape[at] if len(shape) >= _RANK else None
            if size is not None and size >= len(groups[name]):
                found[behind] = shard(at, sizes_within(size, groups[name], parts))
    return found


def _unflatten(program: Program, ref: Ref) -> Ref:
    """Returns the tensor of rank 3 or more of which a tensor of lower rank is a view; the tensor itself if there is
    none.
    """
    first = ref
    while len(program.find_type(ref).shape or ()) < _RANK:
        node = program.by_name[ref.node]
        if node.op not in VIEWS or not node.inputs:
            return first
        ref = node.inputs[0]
    return ref


def is_along(placement: Placement, shape: Dims, at: int, lengths: Iterable[Shard]) -> bool:
    """Tells whether a tensor of this shape is divided along its sequence only.

    Args:
      lengths: how the sequences of the scope's activations are divided.
    """
    if not isinstance(placement, Shard):
        return False
    if len(shape) >= _RANK:
        return placement.dim == at
    if placement.dim != 0:
        return False
    if at == 1:  # [rows x sequence], in runs of a sequence
        return any(placement.sizes == one.sizes for one in lengths)
    return any(find_multiple(placement.sizes, one.sizes) for one in lengths)


def with_sequence(
    program: Program, nodes: Mapping[str, Node], seeds: Mapping[Ref, Shard], parts: int
) -> frozenset[Ref]:
    """Returns the tensors that contain the sequence dimension, under scopes that divide every layer along it.

    Args:
      nodes: those of split scopes, by name.
    """
    found: dict[Ref, Placement] = dict(seeds)
    inside = [(n, rule) for n in nodes.values() if context_of(n.scope) is not None and (rule := find_rule(n.op))]
    for node, rule in inside:
        current = [found.get(ref, B) for ref in node.inputs]
        if all(p == B for p in current):
            continue
        options = rule.strategies(make_op_view(program, node, parts), current)
        fit = (o for o in options if all(p == c for p, c in zip(o.inputs, current) if c != B))
        _note(found, node.list_refs(), next(fit, options[-1]).outputs)
    for node, rule in reversed(inside):  # gradients of keys are sums over queries: they get it from who reads them
        wanted = [found.get(ref) for ref in node.list_refs()]
        if node.op in VIEWS or node.op == "Transpose":
            for option in rule.strategies(make_op_view(program, node, parts), [B] * len(node.inputs), wanted):
                if option.outputs == tuple(wanted):
                    _note(found, node.inputs, option.inputs)
    return frozenset(found)


def _note(found: dict[Ref, Placement], refs: Iterable[Ref], placements: Iterable[Placement]) -> None:
    for ref, placement in zip(refs, placements):
        if isinstance(placement, Shard):
            found.setdefault(ref, placement)


def price_whole_activations(program: Program, node: Node, carriers: Collection[Ref], option: Strategy) -> float:
    """Returns the surcharge of an option that takes whole activations, or produces partial sums of them.

    Args:
      carriers: the tensors that contain the sequence dimension.
    """
    whole = [ref for ref, p in zip(node.inputs, option.inputs) if isinstance(p, Replicate)]
    whole += [ref for ref, p in zip(node.list_refs(), option.outputs) if isinstance(p, Partial)]
    return sum(_price_kept_whole(program.find_type(ref)) for ref in whole if ref in carriers)


def nothing_along(program: Program, layers: Mapping[str, int]) -> PlanError:
    """Creates the error for scopes in which no tensor around the products has a sequence that can be divided."""
    first = program.by_name[next(iter(layers))]
    shapes = dict.fromkeys(f"{program.by_name[n].op} {list(program.by_name[n].outputs[0].shape or ())}" for n in layers)
    at = layers[first.name]
    return PlanError(
        "the layers under a split scope cannot be divided along their sequence",
        op=first.scope,
        given=f"context={at}; " + ", ".join(list(shapes)[:4]),
        expected=f"activations of rank 3 around products, with a part of dimension {at} for each rank",
        action="name the other dimension, use fewer ranks, or take the scope away",
    )
