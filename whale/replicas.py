"""Compares variables between ranks, from each rank's description of its variables.

Decision: 0178.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sketch(NamedTuple):
    """A description of a variable of floating point, by which copies that differ by rounding only are recognised.

    Attributes:
      tolerance: how far copies may be apart, relative to the norm of a block: the root of the dtype's unit in the last
        place. What every step rounds otherwise adds up as a random walk does, and reaches it after millions of steps.
      infinite: number of elements that are not finite.
      blocks: for each block of elements, in their order, its Euclidean norm, and its products with vectors of signs,
        which are the same on all ranks. The products of two copies are as far apart as the copies are, give or take.
    """

    tolerance: float
    infinite: int
    blocks: list[list[float]]


class Held(NamedTuple):
    """Describes a rank's replica of a variable to the other ranks, so that replicas can be compared.

    Attributes:
      checksum: of all bytes.
      must: whether replicas have to be equal at this point of the run.
      sketch: of a floating-point variable that ranks may round differently; None: all bytes have to be equal.
    """

    checksum: int
    must: bool
    sketch: Sketch | None = None


Said = Mapping[str, Held]  # by name of the variable

_DEVIATIONS = 4.0  # of a product with random signs, in units of the distance; one of 16,000 is beyond it


def find_differing(said: Sequence[Said]) -> tuple[dict[str, list[int]], int]:
    """Compares what the ranks say, in order of ranks; what only one of them names is left out.

    Returns:
      (name of a variable that differs -> the ranks that have another value than the first that holds it,
      number of variables that were compared).
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
    """Tells whether two copies are equal, or apart by no more than rounding where both have a sketch."""
    if one.checksum == other.checksum:
        return True
    return one.sketch is not None and other.sketch is not None and differ_by_rounding(one.sketch, other.sketch)


def differ_by_rounding(one: Sketch, other: Sketch) -> bool:
    """Tells whether what two sketches describe is as good as equal."""
    if one.infinite != other.infinite or len(one.blocks) != len(other.blocks):
        return False
    for (norm, *products), (_, *others) in zip(one.blocks, other.blocks):
        if any(abs(a - b) > _DEVIATIONS * one.tolerance * norm for a, b in zip(products, others)):
            return False
    return True


def in_words(found: Mapping[str, Sequence[int]]) -> str:
    """Describes the first few variables and the ranks with other values: "w on rank 1, b on ranks 1 and 3"."""
    words = [
        f"{name.partition('#')[0]} on rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"
        for name, ranks in found.items()
    ]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
