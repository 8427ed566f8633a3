"""Sequence parallelism: activations between the products of a split scope are divided along the sequence.

Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2: normalisations,
residual sums and dropout work on parts of the sequence. The sum behind a product becomes a reduce-scatter, and an
all-gather stands before the next one: the same bytes, one transfer more, so what is communicated does not ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from whale.errors import PlanError
from whale.ir.layout import Partial, Shard, Strategy, shard
from whale.ir.ops import VIEWS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims, TensorType
from whale.passes.analysis.rank_groups import sizes_within
from whale.passes.analysis.resharding_cost import LATENCY
from whale.passes.analysis.scopes import sequence_of

_REDUCTIONS = frozenset({"Sum", "Mean", "BiasAddGrad"})  # a normalisation's statistics, and gradients of its weights
RANK = 3  # least rank of activations: batch and sequence in either order, features
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
            if shape is None or len(shape) != RANK or shape[-1] not in widths or shape in weights:
                continue
            lies, size, group = strategies[name].outputs[ref.index], shape[at or 0], groups[name]
            if size is None or size < len(group) or (isinstance(lies, Shard) and lies.dim == RANK - 1):
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
            found += price_kept_whole(program.find_type(ref))
    return found


def price_kept_whole(activation: TensorType) -> float:
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
            if len(shape := program.find_type(ref).shape or ()) == RANK:
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
