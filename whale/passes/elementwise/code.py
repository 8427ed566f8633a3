"""Writes elementwise arithmetic as text (whale_ops/core/compute/update_program.h): instructions, and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

MOST_OF_A_KIND = 64  # operands that the text can name
SUMS = ("Sum", "Mean")  # instructions that sum what they read over the first sizes


class Value(NamedTuple):
    """The ``number``-th result of the instructions ("="), or an operand of kind v, s, r, c or o."""

    kind: str
    number: int


Step = tuple[str, tuple[Value, ...]]


@dataclass
class Instructions:
    """Collects instructions, (operation, operands), whose results have no registers yet; a result has its instruction's
    number.
    """

    steps: list[Step] = field(default_factory=list)

    def add(self, op: str, *operands: Value) -> Value:
        """Adds an instruction and returns its result."""
        self.steps.append((op, operands))
        return Value("=", len(self.steps) - 1)

    def add_sum(self, operands: list[Value]) -> Value:
        """Adds the instructions of a sum from left to right, as AddN adds, and returns the total."""
        total = operands[0]
        for one in operands[1:]:
            total = self.add("Add", total, one)
        return total


@lru_cache(maxsize=256)
def place_instructions(
    steps: tuple[Step, ...], final: tuple[Value, ...], results: tuple[Value, ...]
) -> tuple[str, ...] | None:
    """Returns the instructions as text, with registers for their results; None if there are too many temporary values.

    Results of ``SUMS`` have registers of their own, in their order.
    """
    last: dict[Value, int] = {}
    for i, (_, operands) in enumerate(steps):
        last.update(dict.fromkeys(operands, i))
    last.update({value: len(steps) for value in results})  # they are copied at the end, if not computed in place
    places: dict[Value, str] = {}
    copies: list[str] = []
    # A result can be read again where it lies; a variable can be written once nobody reads what it was.
    for i, value in enumerate(results):
        if value.kind == "=" and value not in places:
            places[value] = f"y{i}"
    for i, value in enumerate(final):
        free = value.kind == "=" and value not in places and last.get(Value("o", i), -1) <= value.number
        if free:
            places[value] = f"n{i}"
    ends = {value for value in (*final, *results) if value not in places}
    lines: list[str] = []
    unused: list[int] = []
    count = sums = 0
    for i, (op, operands) in enumerate(steps):
        read = [_format_value(o, places) for o in operands]
        for one in dict.fromkeys(operands):
            if last[one] == i and one not in ends and places.get(one, "").startswith("t"):
                unused.append(int(places[one][1:]))
        value = Value("=", i)
        if op in SUMS:
            lines.append(f"{op} z{sums} {read[0]}")
            sums += 1
            continue
        if value not in places:
            if not unused:
                unused.append(count)
                count += 1
            places[value] = f"t{unused.pop()}"
            if value not in last and value not in ends:  # nobody needs it
                unused.append(int(places[value][1:]))
        lines.append(" ".join((op, places[value], *read)))
    for letter, values in (("y", results), ("n", final)):
        for i, value in enumerate(values):
            if places.get(value) != f"{letter}{i}" and (letter, value) != ("n", Value("o", i)):
                copies.append(f"Copy {letter}{i} {_format_value(value, places)}")
    return None if count > MOST_OF_A_KIND else (*lines, *copies)


def _format_value(value: Value, places: Mapping[Value, str]) -> str:
    return places[value] if value.kind == "=" else f"{value.kind}{value.number}"
