"""Rules of ops that process one dimension in order: sorts, top-k, running sums."""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.dims import freeze, make_labels, read_axis, write_term
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def cumulative(op: OpView) -> str:
    """the axis, which is whole"""
    before = op.inputs[0].shape
    at = None if before is None else read_axis(op, 1, len(before))
    if before is None or at is None:
        return REPLICATED
    labels = write_term(freeze(make_labels("a", len(before)), [at]))
    return f"{labels}, . -> {labels}"


def approximate_top_k(op: OpView) -> str:
    """reduction_dimension, which is whole"""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    labels, at = make_labels("a", len(before)), int(op.attr("reduction_dimension", -1)) % len(before)
    result = write_term("k^" if n == at else x for n, x in enumerate(labels))
    return f"{write_term(freeze(labels, [at]))} -> {result}, {result}"


RULES = (
    rule("Cumsum", cumulative, lin="0"),
    rule("Cumprod CumulativeLogsumexp", cumulative),
    rule("TopKV2", "* n^, . -> * k^, * k^"),
    rule("TopK TopKUnique TopKWithUnique", "* n^ -> * k^, * k^"),
    rule("ApproxTopK", approximate_top_k),
    rule("NthElement", "* n^, . -> *"),
    rule("IsotonicRegression", "b n^ -> b n^, b n^"),
)
