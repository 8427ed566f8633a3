"""Compares variables between ranks, from each rank's description of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Name -> (checksum of its value, whether it has to be equal by now) of a variable that a rank holds whole.
Said = Mapping[str, tuple[int, bool]]


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
        if len(held) < 2 or not any(must for _, must in held.values()):
            continue
        compared += 1
        first = next(iter(held.values()))[0]
        if others := [rank for rank, (checksum, _) in held.items() if checksum != first]:
            found[name] = others
    return found, compared


def in_words(found: Mapping[str, Sequence[int]]) -> str:
    """Describes the first few variables and the ranks with other values: "w on rank 1, b on ranks 1 and 3"."""
    words = [
        f"{name.partition('#')[0]} on rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"
        for name, ranks in found.items()
    ]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
