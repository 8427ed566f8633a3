"""Refuses split scopes over programs that partition tokens by expert into dynamically sized tensors."""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.ops import IDENTITIES, RESHAPES
from whale.ir.program import Ref
from whale.passes.autoshard.region import SplitRegion

_TAKE_APART = frozenset({"DynamicPartition", "SplitV", "Slice", "StridedSlice"})


def refuse_unbounded_expert_rows(region: SplitRegion) -> None:
    """Raises an error for products with split weights whose rows are a dynamically sized part of a tensor.

    In a program with a product, and variables, for each expert, no layout says which rank has an expert: every rank
    would compute every expert, of all tokens.

    Raises:
      PlanError: there are such products, of two parts of one tensor or more.
    """
    parts: dict[Ref, dict[Ref, str]] = {}
    for name, uses in region.weights.items():
        weights = {i for i, _ in uses}
        for i, ref in enumerate(region.nodes[name].inputs):
            part = None if i in weights else _part_behind(region, ref)
            if part is not None:
                table = _origin(region, region.program.by_name[part.node].inputs[0])
                parts.setdefault(table, {}).setdefault(part, name)
    for table, found in parts.items():
        if len(found) > 1:
            part, product = next(iter(found.items()))
            by = region.program.by_name[part.node]
            raise PlanError(
                "tokens that a program splits by expert cannot be sent to the experts' ranks",
                op=f"{by.name} ({by.op})",
                given=f"rows of {table} in {len(found)} parts, as large as the run finds; {product} and others "
                "multiply each by a weight of wh.split",
                expected="weights [experts, ...] and slots [experts, capacity, width]; the run may say the capacity",
                action="use wh.layers.MoE(experts, hidden, capacity_factor=None), which drops no token, or "
                "tf.scatter_nd and tf.gather_nd as in docs/guides/giant.md",
            )


def _part_behind(region: SplitRegion, ref: Ref) -> Ref | None:
    """Follows a tensor of dynamic size back to the result of the op that selected its rows from a tensor of known size.

    Returns None where there is no such op.
    """
    program = region.program
    while None in (program.find_type(ref).shape or ())[:1]:
        node = program.by_name[ref.node]
        apart = node.op in _TAKE_APART
        data = node.inputs[:1] if apart else node.inputs
        unknown = [r for r in data if None in (program.find_type(r).shape or ())[:1]]
        if not unknown:
            return ref if apart else None
        ref = unknown[0]
    return None


def _origin(region: SplitRegion, ref: Ref) -> Ref:
    while (node := region.program.by_name[ref.node]).op in IDENTITIES | RESHAPES and node.inputs:
        ref = node.inputs[0]
    return ref
