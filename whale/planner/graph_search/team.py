"""Evaluates strategies in several processes: the first one searches, and assigns some strategies to the others.

Asked           a request to a member to predict a strategy
Answer          the prediction, or the reason why the strategy is invalid
Team            the interface through which the search uses the other members
try_candidate   predicts one strategy
Member          runs in each process but the first
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
    """Represents a request to predict a strategy, which is rejected if its step takes ``needed_s`` or longer.

    Attributes:
      computing_s: lower bound of the seconds of its computation; 0: none.
    """

    strategy: ParallelStrategy
    needed_s: float
    computing_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """Holds a member's prediction of a strategy, or the reason why the strategy cannot run.

    Attributes:
      seconds, lacking_bytes, held: see `whale.planner.graph_search.predict.Candidate`.
      lost: why the strategy cannot run; empty: it can.
      across: it cannot run because it needs a value of all micro-batches before the last one is finished.
      is_bound: see `whale.planner.graph_search.predict.Candidate`.
    """

    seconds: float = 0.0
    lacking_bytes: float = 0.0
    held: dict[int, int] = {}
    lost: str = ""
    across: bool = False
    is_bound: bool = False


class Team(Protocol):
    """Gives the searching process access to the other members. ``size`` counts all processes, the first one
    included.
    """

    size: int

    def ask(self, ways: Sequence[Asked]) -> None:
        """Assigns strategies to the other processes: the first one to member 1, the second to member 2, ...; they begin
        at once.

        `answers` then collects their predictions.

        Args:
          ways: the requests, at most one for each member.
        """

    def answers(self) -> list[Answer]:
        """Waits for the members' predictions; returns them in the order in which the strategies were assigned."""

    def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a strategy that `member` has predicted, and the peak bytes of its fullest rank."""


def try_candidate(plans: Plans, asked: Asked) -> tuple[Answer, Candidate | None]:
    """Predicts a strategy; returns the answer, and the candidate with its plan (None: the strategy cannot run)."""
    try:
        way = predict(plans, asked.strategy, asked.needed_s, asked.computing_s)
    except AcrossMicroBatchesError as error:
        return Answer(lost=error.message, across=True), None
    except WhaleError as error:
        return Answer(lost=error.message), None
    return Answer(way.seconds, way.lacking_bytes, dict(way.held), is_bound=way.is_bound), way


class Member:
    """Predicts the strategies assigned to a process other than the first, and keeps the plan of the fastest one."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self.best: Candidate | None = None

    def answer(self, asked: Asked) -> Answer:
        """Predicts a strategy, and keeps its plan if it fits and is the fastest so far."""
        answer, way = try_candidate(self._plans, asked)
        # The first member evaluates a strategy that does not fit again, in forms that need less memory.
        if way is not None and way.fits and not way.is_bound and (self.best is None or way.seconds < self.best.seconds):
            self.best = way
        return answer

    def plan(self, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a strategy, and the peak bytes of its fullest rank.

        If the strategy is not the fastest so far, it is planned again: the search prefers the first strategy to one
        that is hardly faster.
        """
        best = self.best
        way = best if best is not None and best.strategy == strategy else predict(self._plans, strategy)
        made = way.made or self._plans.make(strategy)
        return made.plan, way.bytes
