"""Defines sharding rules of segment reductions and counts: rows are added to numbered segments, so sharding the rows
makes the result partial.

If the number of segments follows from the data (``SegmentSum``), the rows cannot be sharded.
"""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import find_numpy_dtype
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy, Window, write_runs
from whale.sharding_rules.embedding import SUMS_BY_ID, Rows
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def bincount(op: OpView) -> str:
    """Writes the sharding rule of Bincount, from whether there are weights."""
    weighted = _has_weights(op)
    if weighted is None:
        return REPLICATED
    return f"i*+, ., {'i*+' if weighted else '.'} -> n^"


def _has_weights(op: OpView) -> bool | None:
    """Returns True if each counted number has a weight (operand 2); False if all weigh 1, with no weights at all; None
    if sizes do not tell.
    """
    shape, weights = op.inputs[0].shape, op.inputs[2].shape
    if weights is not None and 0 in weights:
        return False
    return True if op.inputs[0].is_static and weights == shape else None


def dense_bincount(op: OpView) -> str:
    """Writes the sharding rule of DenseBincount, from the rank and from whether there are weights."""
    shape, weighted = op.inputs[0].shape, _has_weights(op)
    if shape is None or weighted is None:
        return REPLICATED
    lead = "b " if len(shape) == 2 else ""
    return f"{lead}i+, ., {f'{lead}i+' if weighted else '.'} -> {lead}n^"


def _find_count_reduction(op: OpView) -> str:
    """Returns the reduction that combines the counts of shards: sum, or max with ``binary_output``, where a count is 0
    or 1.
    """
    return "max" if op.attr("binary_output", False) else "sum"


def _find_linear_weights(op: OpView) -> str | None:
    """Returns ``lin`` of a count: partial sums pass the weights (operand 2), if there are any that are added up; else
    None.
    """
    return "2" if _has_weights(op) and not op.attr("binary_output", False) else None


def _restrict_segments(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Makes segment numbers count from the rank's first segment; rows of other ranks' segments get -1, which drops
    them.
    """
    cut = strategy.outputs[0]
    apart = 0 if op.marks.blocks else None
    if not isinstance(cut, Shard) or cut.dim != 0:
        return Local(blocks=apart) if apart is not None else UNCHANGED
    offset, count = cut.offset(coordinate), cut.local_size(coordinate)
    consts = {2: np.array(count, find_numpy_dtype(op.inputs[2].dtype))}
    if isinstance(strategy.inputs[1], Shard) and len(cut.holders) == 1:
        return Local(blocks=apart, consts=consts)  # one rank has all rows and all segments
    if isinstance(strategy.inputs[1], Shard):
        blocks = op.marks.blocks
        rows, segments = op.inputs[1].elements // blocks, cut.extent // blocks
        own = cut.list_indices(coordinate)[::segments] // segments
        first = np.repeat((np.arange(len(own)) - own) * segments, rows).astype(find_numpy_dtype(op.inputs[1].dtype))
        return Local(blocks=len(own), consts=consts, moved={1: first})
    return Local(blocks=apart, consts=consts, window=Window(1, offset, count, runs=cut.blocks))


def unsorted_segment(op: OpView) -> str:
    """Writes the sharding rule of UnsortedSegmentSum and others, from the blocks that rows stay within.

    Rows, or segments, can be sharded; with known blocks, both together in whole blocks.
    """
    blocks, ids, found = op.marks.blocks, op.inputs[1].shape, op.outputs[0].shape
    if (
        blocks < op.parts
        or op.parts == 1
        or ids is None
        or len(ids) != 1
        or ids[0] is None
        or not found
        or not found[0]
    ):
        return "i*+ q*, i*+, . -> s q*"
    rows = write_runs(ids[0] // blocks, "b", inner=True)
    return f"{rows} q*, {rows}, . -> {write_runs(found[0] // blocks, 'b', inner=True)} q*"


_SORTED = "i^ q*, i^ -> s^ q*"
_COUNTED = "i+ q*, i+, . -> s^ q*"

RULES = (
    rule(
        "UnsortedSegmentSum",
        unsorted_segment,
        lin="0",
        local=_restrict_segments,
        produces_any=True,
        routes=Rows(ids=1, values=0),
    ),
    rule(
        "UnsortedSegmentMax", unsorted_segment, mono="max:0", reduce="max", local=_restrict_segments, produces_any=True
    ),
    rule(
        "UnsortedSegmentMin", unsorted_segment, mono="min:0", reduce="min", local=_restrict_segments, produces_any=True
    ),
    rule("UnsortedSegmentProd", unsorted_segment, reduce="prod", local=_restrict_segments, produces_any=True),
    rule(SUMS_BY_ID, "i^, i^ q* -> =u^, u^ q*", routes=Rows(ids=0, values=1, once=True)),
    rule("SegmentSum SegmentMean", _SORTED, lin="0"),
    rule("SegmentMax", _SORTED, mono="max:0"),
    rule("SegmentMin", _SORTED, mono="min:0"),
    rule("SegmentProd", _SORTED),
    rule("SegmentSumV2", _COUNTED, lin="0"),
    rule("SegmentProdV2", _COUNTED, reduce="prod"),
    rule("SegmentMaxV2", _COUNTED, mono="max:0", reduce="max"),
    rule("SegmentMinV2", _COUNTED, mono="min:0", reduce="min"),
    rule("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN", "v^ q*, i^, i^ -> s^ q*", lin="0"),
    rule("SparseSegmentSumWithNumSegments", "v^ q*, i+, i+, . -> s^ q*", lin="0"),
    rule("SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments", "v^ q*, i^, i^, . -> s^ q*", lin="0"),
    rule("SparseSegmentSumGrad", "s^ q*, i+, i+, . -> n^ q*", lin="0"),
    rule("SparseSegmentMeanGrad SparseSegmentSqrtNGrad", "s^ q*, i^, i^, . -> n^ q*", lin="0"),
    rule("Bincount", bincount, lin=_find_linear_weights),
    rule("DenseBincount", dense_bincount, lin=_find_linear_weights, reduce=_find_count_reduction),
    rule("HistogramFixedWidth", "i*+, ., . -> n^"),
)
