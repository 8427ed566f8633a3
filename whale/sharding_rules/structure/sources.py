"""Rules of ops that yield values without operands: constants and inputs are global values on every rank; iterators and
stacks are on one.
"""

from __future__ import annotations

from whale.sharding_rules.notation import FIRST_RANK, REPLICATED
from whale.sharding_rules.registry import rule

RULES = (
    rule("Const HostConst Placeholder PlaceholderV2 NoOp Restore RestoreSlice RestoreV2 Assert", REPLICATED),
    rule(
        "OneShotIterator IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional IteratorToStringHandle "
        "MakeIterator ReduceDataset DatasetToSingleElement TensorDataset RepeatDataset",
        FIRST_RANK,
    ),
    rule("StackV2 StackPushV2 StackPopV2", FIRST_RANK),
    rule(
        "TensorArrayV3 TensorArrayGradV3 TensorArrayReadV3 TensorArrayWriteV3 TensorArrayGatherV3 TensorArrayScatterV3",
        FIRST_RANK,
    ),
    rule(
        "ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 "
        "MergeSummary StringFormat",
        FIRST_RANK,
    ),
    rule("SaveV2 PrintV2", FIRST_RANK),
)
