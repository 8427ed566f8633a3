"""Where values come from: constants and inputs are global values on every rank; iterators and stacks live on one."""

from __future__ import annotations

from whale.rules.notation import OWNER, REPLICATED
from whale.rules.registry import rule

RULES = (
    rule("Const HostConst Placeholder PlaceholderV2 NoOp Restore RestoreSlice RestoreV2 Assert", REPLICATED),
    rule(
        "OneShotIterator IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional IteratorToStringHandle "
        "MakeIterator ReduceDataset DatasetToSingleElement TensorDataset RepeatDataset",
        OWNER,
    ),
    rule("StackV2 StackPushV2 StackPopV2", OWNER),
    rule(
        "TensorArrayV3 TensorArrayGradV3 TensorArrayReadV3 TensorArrayWriteV3 TensorArrayGatherV3 TensorArrayScatterV3",
        OWNER,
    ),
)
