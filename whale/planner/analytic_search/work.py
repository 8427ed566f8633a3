"""Counts the work of a search, so that what a search finds does not depend on how busy the machine is.

The unit is the second: each step of a search counts as the seconds that it takes on one idle core, on every machine.
Processor time ends a search only if it exceeds the counted work several times over.

Decision: 0158.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

# Seconds of one core for: the estimate of a candidate; the layers' costs on a kind of rank; a stage's cost, computed
# (COST_S) or cached (LOOKUP_S); a random change; a pass of a simulated step, alone or together with other strategies;
# a check whether layers fit into a stage; a stage of a cut; an array element of the exact search.
ESTIMATE_S, LAYERS_S, COST_S, LOOKUP_S, RANDOM_S = 1.1e-5, 4e-4, 1.6e-4, 4e-6, 4e-5
PASS_S, TOGETHER_PASS_S, FIT_S, CUT_S, ELEMENT_S = 1.6e-7, 2e-8, 1.6e-5, 7e-6, 7e-9
PROCESSOR_TIMES = 5  # processor time ends a search at this times the budget
LOOK_S = 0.05  # seconds of work between two looks at the processor time


class OutOfWork(Exception):
    """Raised when a search has used up its budget and has found at least one strategy."""


class Work:
    """Counts the work that searches have done against their common budget.

    Attributes:
        budget_s: seconds of work allowed; infinite: no limit.
        used_s: seconds of work counted so far.
        may_end: a strategy was found, so that the budget may end the search.
        late: processor time, not the budget, has ended the search, because the machine is slow.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.used_s = budget_s, 0.0
        self.may_end = self.late = False
        self._done: set[Hashable] = set()
        self._until_s = time.process_time() + max(1.0, PROCESSOR_TIMES * budget_s)
        self._next_s = LOOK_S

    def spend_once(self, what: Hashable, seconds: float) -> None:
        """Counts work that several searches need but only the first one does; `what` identifies it."""
        if what not in self._done:
            self._done.add(what)
            self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Adds `seconds` to the counted work.

        Raises:
            OutOfWork: the budget (or the processor time) is used up, and a strategy was found.
        """
        self.used_s += seconds
        if self.used_s > self._next_s:
            self._next_s = self.used_s + LOOK_S
            self.late = time.process_time() > self._until_s
        if self.may_end and (self.used_s > self.budget_s or self.late):
            raise OutOfWork
