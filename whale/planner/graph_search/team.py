"""Lets processes look at ways together: the first of them searches, and gives others some of its ways.

Asked       a way that a member is to predict Answer      what it has found Team        what the search asks of the
other members tried       one way, predicted or lost Member      one of the others at work
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from whale.errors import AcrossMicroBatchesError, WhaleError
from whale.ir.plan import Plan
from whale.ir.strategy import ParallelStrategy
from whale.planner.graph_search.predict import Candidate, Plans, predicted


class Asked(msgspec.Struct, frozen=True):
    """A way that a member is to predict; what takes ``needed_s`` or longer is not taken."""

    strategy: ParallelStrategy
    needed_s: float


class Answer(msgspec.Struct, frozen=True):
    """A way as a member has predicted it, or the reason why it cannot run.

    Attributes:
      seconds, lacking_bytes, held: see `whale.planner.graph_search.predict.Candidate`.
      lost: why it cannot run; "": it can.
      across: it needs a value of all micro-batches.
    """

    seconds: float = 0.0
    lacking_bytes: float = 0.0
    held: dict[int, int] = {}
    lost: str = ""
    across: bool = False


class Team(Protocol):
    """The members, as the first of them sees them. ``size`` counts it as well."""

    size: int

    def ask(self, ways: Sequence[Asked]) -> None:
        """Gives one way each to members 1, 2, ..; they begin."""

    def answers(self) -> list[Answer]:
        """Waits for what the members have found, and returns it in the order of asking."""

    def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a way that a member has looked at, and what the fullest rank holds under it."""


def tried(plans: Plans, asked: Asked) -> tuple[Answer, Candidate | None]:
    """Predicts a way; the candidate is None where it cannot run."""
    try:
        way = predicted(plans, asked.strategy, asked.needed_s)
    except AcrossMicroBatchesError as error:
        return Answer(lost=error.message, across=True), None
    except WhaleError as error:
        return Answer(lost=error.message), None
    return Answer(way.seconds, way.lacking_bytes, dict(way.held)), way


class Member:
    """A member other than the first: predicts the ways that it is given, and keeps the plan of the fastest one."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self.best: Candidate | None = None

    def answer(self, asked: Asked) -> Answer:
        """Predicts a way and keeps it if it is the fastest so far."""
        answer, way = tried(self._plans, asked)
        # What does not fit is looked at again by the first member, with less held.
        if way is not None and way.fits and (self.best is None or way.seconds < self.best.seconds):
            self.best = way
        return answer

    def plan(self, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a way, and what the fullest rank holds under it.

        It need not be the fastest so far: a way that is hardly faster than the first one is not taken.
        """
        best = self.best
        way = best if best is not None and best.strategy == strategy else predicted(self._plans, strategy)
        made = way.made or self._plans.made(strategy)
        return made.plan, way.bytes
