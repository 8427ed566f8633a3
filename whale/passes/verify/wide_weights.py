"""Finds weights that are far larger than the rows they meet, so that a step sends little but their gradients."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from whale.ir.layout import B, Partial
from whale.ir.ops import MATMULS
from whale.ir.plan import Plan
from whale.ir.plan_text import format_bytes
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims

_LEAST_BYTES = 16 << 20  # of a gradient: less takes some milliseconds to send
_LEAST_RATIO = 8  # of a gradient's bytes to those of rows and results, there and back
_MOST_STEPS = 8  # of arithmetic between a gradient's product and where it is summed over ranks


@dataclass(frozen=True, slots=True)
class WideWeights:
    """The weights of one shape whose gradients are larger than what dividing their layers would send.

    Attributes:
      shape: of each.
      gradient_bytes: of all of them together.
      rows_bytes: of the rows and results of their products, forward and backward.
    """

    shape: Dims
    gradient_bytes: int
    rows_bytes: int


def explain_wide_weights(program: Program, plan: Plan) -> str:
    """Explains that most of what ranks sum are gradients which a split of their layers would not send; "" if not.

    Args:
      program: expanded, as of the plan.
    """
    found = find_wide_weights(program, plan)
    sent, all_sent = sum(one.gradient_bytes for one in found), _count_summed_bytes(program, plan)
    if not found or 2 * sent < all_sent:
        return ""
    named = []
    for one in found:
        names = [v.name.removesuffix(":0") for v in program.variables if v.type.shape == one.shape]
        shape = "x".join(map(str, one.shape))
        named.append(f"{names[0]} ({shape})" if len(names) == 1 else f"weights of {shape}")
    instead = format_bytes(sum(one.rows_bytes for one in found))
    return (
        f"of {format_bytes(all_sent)} of gradients that each rank of `{plan.program}` sums in a step, "
        f"{format_bytes(sent)} are of {', '.join(named)}, whose rows and results are {instead}; "
        "put what uses it under `with wh.split():`, or set mesh.auto_parallel=True, and ranks send these instead, and "
        "each updates its part of the weight only"
    )


def find_wide_weights(program: Program, plan: Plan) -> list[WideWeights]:
    """Returns the weights, by shape, whose whole gradients are summed over the ranks though their rows are few."""
    if plan.size == 1 or plan.stage_groups or plan.inner is not None:
        return []
    found: defaultdict[Dims, list[int]] = defaultdict(lambda: [0, 0])
    for ref in _list_summed(program, plan):
        product, gradient_bytes = _find_product(program, ref), program.find_type(ref).bytes
        if product is None or gradient_bytes < _LEAST_BYTES:
            continue
        rows_bytes = 2 * sum(program.find_type(r).bytes for r in product.inputs)
        if gradient_bytes >= _LEAST_RATIO * rows_bytes:
            both = found[program.find_type(ref).shape or ()]
            both[0] += gradient_bytes
            both[1] += rows_bytes
    return [WideWeights(shape, *both) for shape, both in found.items()]


def _list_summed(program: Program, plan: Plan) -> list[Ref]:
    """Lists the tensors of the program itself that are summed over all ranks, and wanted whole by each."""
    return [
        r.ref
        for r in plan.reshards
        if not r.graph and isinstance(r.source, Partial) and r.target == B and program.find_type(r.ref).is_static
    ]


def _count_summed_bytes(program: Program, plan: Plan) -> int:
    return sum(program.find_type(ref).bytes for ref in _list_summed(program, plan))


def _find_product(program: Program, ref: Ref) -> Node | None:
    """Returns the product of matrices of which a gradient is, arithmetic on its elements aside; None: there is none."""
    t = program.find_type(ref)
    for _ in range(_MOST_STEPS):
        node = program.by_name[ref.node]
        if node.op in MATMULS:
            return node if all(program.find_type(r).is_static for r in node.inputs) else None
        alike = [r for r in node.inputs if program.find_type(r) == t]
        if len(alike) != 1:
            return None
        (ref,) = alike
    return None
