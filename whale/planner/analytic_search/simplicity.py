"""Ranks strategies by simplicity: of two about equally fast strategies the simpler one is chosen.

A strategy counts as faster only if its predicted step is shorter by more than the prediction can tell (`TIE`).

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
    """Returns a tuple of counts, each at least 1, that make a strategy harder to understand.

    In order: stages, chunks, largest tensor-parallel degree, context-parallel degree, distinct stages, device groups
    within a stage, kinds of recompute.
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
    """Returns True if no count of `one` is larger than the same count of `other`, and at least one is smaller."""
    return one != other and all(a <= b for a, b in zip(one, other))


def find_front(
    others: Iterable[tuple[float, Complexity, ParallelStrategy]], than: Complexity
) -> list[tuple[float, Complexity, ParallelStrategy]]:
    """Returns the (seconds, complexity, strategy) entries simpler than `than`, fastest first: a Pareto front.

    An entry is left out if a faster one is as simple or simpler.
    """
    found: list[tuple[float, Complexity, ParallelStrategy]] = []
    for one in sorted((e for e in others if is_simpler(e[1], than)), key=lambda e: e[:2]):
        if not any(known == one[1] or is_simpler(known, one[1]) for _, known, _ in found):
            found.append(one)
    return found
