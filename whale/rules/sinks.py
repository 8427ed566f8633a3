"""Ops that run once, on the group's first rank: what they print or write is for people or files."""

from __future__ import annotations

from whale.rules.notation import OWNER
from whale.rules.registry import rule

RULES = (
    rule(
        "ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 "
        "MergeSummary StringFormat",
        OWNER,
    ),
    rule("SaveV2 PrintV2", OWNER),
)
