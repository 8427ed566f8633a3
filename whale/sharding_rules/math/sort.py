"""Rules of ops that process one dimension in order: sorts, top-k, running sums."""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.dims import axis, freeze, names, term
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def cumulative(op: OpView) -> str:
    """the axis, which is whole"""
    before = op.inputs[0].shape
    at = None if before is None else axis(op, 1, len(before))
    if before is None or at is None:
        return REPLICATED
    labels = term(freeze(names("a", len(before)), [at]))
    return f"{labels}, . -> {labels}"


def approximate_top_k(op: OpView) -> str:
    """reduction_dimension, which is whole"""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    labels, at = names("a", len(before)), int(op.attr("reduction_dimension", -1)) % len(before)
    result = term("k^" if n == at else x for n, x in enumerate(labels))
    return f"{term(freeze(labels, [at]))} -> {result}, {result}"


RULES = (
    rule("Cumsum", cumulative, lin="0"),
    rule("Cumprod CumulativeLogsumexp", cumulative),
    rule("TopKV2", "* n^, . -> * k^, * k^"),
    rule("TopK TopKUnique TopKWithUnique", "* n^ -> * k^, * k^"),
    rule("ApproxTopK", approximate_top_k),
    rule("NthElement", "* n^, . -> *"),
    rule("IsotonicRegression", "b n^ -> b n^, b n^"),
)
