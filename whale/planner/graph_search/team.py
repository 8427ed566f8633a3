"""Evaluates strategies in several processes: the first one searches, and assigns some strategies to the others.

Asked           a strategy that a member is to predict
Answer          its prediction, or the reason why it is invalid
Team            the interface of the search to the other members
try_candidate   predicts one strategy
Member          a member other than the first at work
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from whale.errors import AcrossMicroBatchesError, WhaleError
from whale.ir.plan import Plan
from whale.ir.strategy import ParallelStrategy
from whale.planner.graph_search.predict import Candidate, Plans, predict


class Asked(msgspec.Struct, frozen=True):
    """A strategy that a member is to predict; it is rejected if a step takes ``needed_s`` or longer."""

    strategy: ParallelStrategy
    needed_s: float


class Answer(msgspec.Struct, frozen=True):
    """A strategy's prediction by a member, or the reason why it cannot run.

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
    """The interface to the other members, for the first one. ``size`` includes the first one."""

    size: int

    def ask(self, ways: Sequence[Asked]) -> None:
        """Assigns one strategy each to members 1, 2, ..., which begin at once."""

    def answers(self) -> list[Answer]:
        """Waits for the members' results, and returns them in the order of the assignment."""

    def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a strategy that a member has predicted, and the bytes of the rank with the highest
        peak.
        """


def try_candidate(plans: Plans, asked: Asked) -> tuple[Answer, Candidate | None]:
    """Predicts a strategy; the candidate is None if it cannot run."""
    try:
        way = predict(plans, asked.strategy, asked.needed_s)
    except AcrossMicroBatchesError as error:
        return Answer(lost=error.message, across=True), None
    except WhaleError as error:
        return Answer(lost=error.message), None
    return Answer(way.seconds, way.lacking_bytes, dict(way.held)), way


class Member:
    """A member other than the first: predicts assigned strategies, and keeps the plan of the fastest one."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self.best: Candidate | None = None

    def answer(self, asked: Asked) -> Answer:
        """Predicts a strategy and keeps its plan if it is the fastest so far."""
        answer, way = try_candidate(self._plans, asked)
        # What does not fit is looked at again by the first member, with less held.
        if way is not None and way.fits and (self.best is None or way.seconds < self.best.seconds):
            self.best = way
        return answer

    def plan(self, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a strategy, and the bytes of the rank with the highest peak.

        It need not be the fastest so far: a strategy that is hardly faster than the first one is not chosen.
        """
        best = self.best
        way = best if best is not None and best.strategy == strategy else predict(self._plans, strategy)
        made = way.made or self._plans.make(strategy)
        return made.plan, way.bytes
