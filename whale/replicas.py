"""Compares the ranks' replicas of variables without sending them: each rank sends a sketch of each variable (norms and
random projections of its blocks), and sketches that differ by more than rounding show that replicas have diverged.

Used by ``wh.check_replicas``, ``debug.check_replicas`` and at the end of a run.

Decision: 0178.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sketch(NamedTuple):
    """Describes the values of a floating-point variable, so that replicas that differ only by rounding are recognised
    as equal.

    Attributes:
        tolerance: how far replicas may be apart, relative to the norm of a block: the square root of the dtype's unit
            in the last place. Rounding differences of single steps add up like a random walk, and reach it only after
            millions of steps.
        infinite: number of elements that are not finite.
        blocks: for each block of elements, in order, its Euclidean norm, then its products with vectors of random
            signs, which are the same on all ranks. The products of two replicas are about as far apart as the replicas
            are.
    """

    tolerance: float
    infinite: int
    blocks: list[list[float]]


class Held(NamedTuple):
    """Describes a rank's replica of a variable to the other ranks, so that replicas can be compared.

    Attributes:
        checksum: checksum of all bytes.
        must: whether replicas have to be equal at this point of the run.
        sketch: of a floating-point variable that ranks may round differently; None: all bytes have to be equal.
    """

    checksum: int
    must: bool
    sketch: Sketch | None = None


Said = Mapping[str, Held]  # by name of the variable

_DEVIATIONS = 4.0  # standard deviations of a product with random signs; one product in 16,000 is beyond


def find_differing(said: Sequence[Said]) -> tuple[dict[str, list[int]], int]:
    """Compares the ranks' descriptions of their variables; variables that only one rank holds are left out.

    Args:
        said: for each rank, variable -> its description.

    Returns:
        (name of a variable that differs -> ranks whose value differs from that of the first rank that holds it, number
            of variables that were compared).
    """
    found: dict[str, list[int]] = {}
    compared = 0
    for name in dict.fromkeys(name for one in said for name in one):
        held = {rank: one[name] for rank, one in enumerate(said) if name in one}
        if len(held) < 2 or not any(one.must for one in held.values()):
            continue
        compared += 1
        first = next(iter(held.values()))
        if others := [rank for rank, one in held.items() if not _is_equal(first, one)]:
            found[name] = others
    return found, compared


def _is_equal(one: Held, other: Held) -> bool:
    """Returns True if two replicas are equal, or, if both have a sketch, differ only by rounding."""
    if one.checksum == other.checksum:
        return True
    return one.sketch is not None and other.sketch is not None and differ_by_rounding(one.sketch, other.sketch)


def differ_by_rounding(one: Sketch, other: Sketch) -> bool:
    """Returns True if the variables that two sketches describe differ only by rounding."""
    if one.infinite != other.infinite or len(one.blocks) != len(other.blocks):
        return False
    for (norm, *products), (_, *others) in zip(one.blocks, other.blocks):
        if any(abs(a - b) > _DEVIATIONS * one.tolerance * norm for a, b in zip(products, others)):
            return False
    return True


def in_words(found: Mapping[str, Sequence[int]]) -> str:
    """Formats differing variables as text; the first five are named: "w on rank 1, b on ranks 1 and 3".

    Args:
        found: variable -> ranks with another value, from `find_differing`.
    """
    words = [
        f"{name.partition('#')[0]} on rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"
        for name, ranks in found.items()
    ]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
