"""Assigns overlapping spans of a timeline to lanes, and rounds numbers for a page."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.graph.predict import Span


def side_by_side(spans: Sequence[Span]) -> tuple[list[tuple[int, Span]], int]:
    """Returns each span, ordered by start, with the first free lane, and the number of lanes."""
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
    """Rounds to six digits, which suffice for a page."""
    return float(f"{seconds:.6g}")
