"""Compares how simple strategies are, so that a simpler one wins where the faster one gains less than can be known.

Decision: 0194.
"""

from __future__ import annotations

from collections.abc import Iterable

from whale.ir.strategy import ParallelStrategy

# Part of a step by which a strategy that is not as simple has to be faster: predictions of two strategies of one model
# are off together, but not to a thousandth.
TIE = 2e-3

Complexity = tuple[int, ...]


def measure_complexity(strategy: ParallelStrategy) -> Complexity:
    """Returns what makes a strategy harder to follow, each at least 1: its stages, their chunks, the ranks that divide
    tensors and tokens, the kinds of stages, of devices within a stage, and of recompute.
    """
    kinds = {stage.parts for stage in strategy.stages}
    return (
        len(strategy.stages),
        strategy.chunks,
        max([part.tensor for parts in kinds for part in parts]),
        strategy.context,
        len(kinds),
        max(map(len, kinds)),
        len(set(strategy.recomputes)),
    )


def is_simpler(one: Complexity, other: Complexity) -> bool:
    """Tells whether nothing of a strategy is more complex than of another, and something is less."""
    return one != other and all(a <= b for a, b in zip(one, other))


def find_front(
    others: Iterable[tuple[float, Complexity, ParallelStrategy]], than: Complexity
) -> list[tuple[float, Complexity, ParallelStrategy]]:
    """Returns those (seconds, complexity, strategy) that are simpler than `than`, fastest first, without any that is
    slower than one that is as simple or simpler.
    """
    found: list[tuple[float, Complexity, ParallelStrategy]] = []
    for one in sorted((e for e in others if is_simpler(e[1], than)), key=lambda e: e[:2]):
        if not any(known == one[1] or is_simpler(known, one[1]) for _, known, _ in found):
            found.append(one)
    return found
