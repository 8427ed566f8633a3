"""Puts overlapping spans of a timeline into lanes, and rounds numbers to what a page needs."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.graph.predict import Span


def side_by_side(spans: Sequence[Span]) -> tuple[list[tuple[int, Span]], int]:
    """Returns each span, given by start, with the first lane that is free, and the number of lanes."""
    ends: list[float] = []
    found = []
    for span in spans:
        lane = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = span.end_s
        found.append((lane, span))
    return found, len(ends)


def short(seconds: float) -> float:
    """Rounds to six digits, which are enough for a page."""
    return float(f"{seconds:.6g}")
