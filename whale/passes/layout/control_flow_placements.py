"""What becomes of a placement where others meet it: at a loop's next turn, behind the branches of a conditional."""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.layout import B, Broadcast, FirstRank, Partial, Placement, Split
from whale.ir.values import UNMOVABLE


def at_next_turn(state: Placement, out: Placement, dtype: str, free: bool) -> Placement:
    """What a loop variable becomes when it enters as ``state`` and the body yields ``out``."""
    if state == out or type(out) is FirstRank:
        return state
    if dtype in UNMOVABLE:
        return out if free and state == B else state
    if state == B:
        return out  # B -> S and B -> P cost nothing
    if out == B:
        return B if type(state) is Partial else state
    return state if type(state) is Split else B


def behind_branches(options: Sequence[Placement], dtype: str) -> Placement:
    """How a result leaves a conditional whose branches yield it as ``options``."""
    first = options[0]
    if all(o == first for o in options):
        return B if type(first) is FirstRank else first
    if dtype in UNMOVABLE:
        return next((o for o in options if o != B), B)
    splits = {o for o in options if type(o) is Split}
    rest = {o for o in options if type(o) not in (Split, Broadcast)}
    if len(splits) == 1 and not rest:
        return next(iter(splits))
    partial = {o for o in options if type(o) is Partial}
    return (
        next(iter(partial))
        if len(partial) == 1 and not splits and all(type(o) in (Partial, Broadcast) for o in options)
        else B
    )
