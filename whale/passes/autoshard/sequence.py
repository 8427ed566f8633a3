"""Implements sequence and context parallelism: activations are sharded along the sequence.

Sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section
4.2) is about the nodes between the products of a split scope: normalisations, residual sums and dropout work on parts
of the sequence. The all-reduce behind a product becomes a reduce-scatter, and an all-gather precedes the next one: the
same bytes, one transfer more. So communication cost alone would not choose it, and a surcharge on activations that are
not sharded does.

Under context parallelism every layer is sharded along the sequence, and weights are replicated. A product that reads a
weight yields parts of the sequence, forward and backward; the nodes between products follow, since nothing has to move
there. Attention is different, since its scores need every key. The choice by cost reshards from sequence to heads for
it (Jacobs et al., "DeepSpeed Ulysses", 2023); a surcharge keeps it from gathering all keys and values on every rank,
which moves no more among few ranks.
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
_RANK = 3  # least rank of an activation: batch and sequence in either order, features
_WHOLE = 4.0  # surcharge in transfers of the activation; sharding it costs two transfers at most


def along_sequence(
    program: Program, nodes: Mapping[str, Node], groups: Mapping[str, frozenset[int]], parts: int,
    weights: Collection[Dims], strategies: Mapping[str, Strategy],
) -> dict[Ref, Shard]:  # fmt: skip
    """Returns the placements that activations between products should have, in scopes with ``sequence=``.

    Args:
      nodes: the nodes of split scopes, by name.
      groups: node -> the ranks that divide it.
      weights: shapes of the variables that products read. A tensor is taken for an activation if its last dimension is
        one of their sizes; a tensor of just such a shape is a weight, or its gradient.
      strategies: the choice by cost alone; a tensor that it shards by features is not between products, and left out.
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
    """Returns the surcharge of an option that leaves activations in ``wanted`` unsharded along their sequence; reshapes
    of partial sums are free.
    """
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
    """Returns the surcharge for an activation that is not sharded along its sequence: several times the cost of sending
    it.
    """
    return _WHOLE * (LATENCY + activation.bytes)


def check_sequences(
    program: Program, nodes: Iterable[Node], wanted: Mapping[Ref, Shard], strategies: Mapping[str, Strategy]
) -> None:
    """Checks that some activation is sharded along its sequence, if scopes name one.

    A single scope that succeeds is enough: other scopes may surround a loss, or create the variables.

    Raises:
      PlanError: there is no such activation.
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
            expected=f"activations of rank 3 around products, with at least one index of dimension {at} per rank",
            action="name the other dimension (`sequence=`), leave it out, or use fewer ranks",
        )


def layers_in_context(products: Mapping[str, Node]) -> dict[str, int]:
    """Maps products and lookups under scopes with ``context=`` to the sequence dimension that the scope names."""
    found = {name: context_of(node.scope) for name, node in products.items()}
    return {name: at for name, at in found.items() if at is not None}


def context_seeds(
    program: Program, layers: Mapping[str, int], read: Mapping[str, Sequence[tuple[int, str]]],
    groups: Mapping[str, frozenset[int]], parts: int,
) -> dict[Ref, Shard]:  # fmt: skip
    """Returns the activations around products under context parallelism with the placements that they should have.

    If a product reads or yields a flattened activation, the activation before the reshape is returned in its place.

    Args:
      layers: product -> sequence dimension, as of ``layers_in_context``.
      read: product -> its operands that are weights, with the weights' handles.
      groups: node -> the ranks that divide it.
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
    """Returns the tensor of rank 3 or more that ``ref`` is a reshape of; ``ref`` itself if there is none."""
    first = ref
    while len(program.find_type(ref).shape or ()) < _RANK:
        node = program.by_name[ref.node]
        if node.op not in VIEWS or not node.inputs:
            return first
        ref = node.inputs[0]
    return ref


def is_along(placement: Placement, shape: Dims, at: int, lengths: Iterable[Shard]) -> bool:
    """Returns True if ``placement`` shards a tensor along its sequence and nothing else.

    Args:
      shape: shape of the tensor: [batch, sequence, ..], or flattened to [batch x sequence, ..].
      at: the sequence dimension before flattening.
      lengths: the splits of sequences of the scope's activations, with which a split of flattened rows is compared.
    """
    if not isinstance(placement, Shard):
        return False
    if len(shape) >= _RANK:
        return placement.dim == at
    if placement.dim != 0:
        return False
    if at == 1:  # flattened to [batch x sequence, ...]: a run of indices for each sequence
        return any(placement.sizes == one.sizes for one in lengths)
    return any(find_multiple(placement.sizes, one.sizes) for one in lengths)


def with_sequence(
    program: Program, nodes: Mapping[str, Node], seeds: Mapping[Ref, Shard], parts: int
) -> frozenset[Ref]:
    """Returns the tensors that contain the sequence dimension, under scopes with ``context=``.

    The search starts from ``seeds`` and goes forward through all ops, then backward through reshapes and transposes.

    Args:
      nodes: the nodes of split scopes, by name.
      seeds: activations that contain the sequence, with their placements.
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
    for node, rule in reversed(inside):  # backward: gradients of keys, sums over queries, are found from their readers
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
    """Returns the surcharge of an option that reads replicated activations, or yields partial sums of them, under
    context parallelism.

    Args:
      carriers: the tensors that contain the sequence dimension.
    """
    whole = [ref for ref, p in zip(node.inputs, option.inputs) if isinstance(p, Replicate)]
    whole += [ref for ref, p in zip(node.list_refs(), option.outputs) if isinstance(p, Partial)]
    return sum(_price_kept_whole(program.find_type(ref)) for ref in whole if ref in carriers)


def nothing_along(program: Program, layers: Mapping[str, int]) -> PlanError:
    """Creates the error for scopes with ``context=`` in which no tensor around products has a sequence that can be
    sharded.
    """
    first = program.by_name[next(iter(layers))]
    shapes = dict.fromkeys(f"{program.by_name[n].op} {list(program.by_name[n].outputs[0].shape or ())}" for n in layers)
    at = layers[first.name]
    return PlanError(
        "the layers under a split scope cannot be divided along their sequence",
        op=first.scope,
        given=f"context={at}; " + ", ".join(list(shapes)[:4]),
        expected=f"activations of rank 3 around products, with at least one index of dimension {at} per rank",
        action="name the other dimension (`context=`), use fewer ranks, or remove the scope",
    )
