"""Ops that run once, on the group's first rank: what they print or write is for people or files."""

from __future__ import annotations

from whale.sharding_rules.notation import FIRST_RANK
from whale.sharding_rules.registry import rule

RULES = (
    rule(
        "ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 "
        "MergeSummary StringFormat",
        FIRST_RANK,
    ),
    rule("SaveV2 PrintV2", FIRST_RANK),
)
