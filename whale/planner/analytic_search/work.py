"""Counts the work of a search, so that what it finds does not depend on how busy the machine is.

Work is counted in seconds that the steps of a search take on one idle core; the same steps count the same everywhere.
The processor's time ends a search only where it takes several times as long as it should.

Decision: 0158.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

# Seconds of one core: an estimate of a candidate; the layers' costs on a kind of rank; a stage's cost, computed or
# looked up; a random change; a pass of a step that is simulated, alone or with those of others; a look at whether
# layers fit into a stage; a stage that takes layers; an element of the exact search.
ESTIMATE_S, LAYERS_S, COST_S, LOOKUP_S, RANDOM_S = 1.1e-5, 4e-4, 1.6e-4, 4e-6, 4e-5
PASS_S, TOGETHER_PASS_S, FIT_S, CUT_S, ELEMENT_S = 1.6e-7, 2e-8, 1.6e-5, 7e-6, 7e-9
PROCESSOR_TIMES = 5  # of the budget that the processor's time may be
LOOK_S = 0.05  # of work between two looks at it


class OutOfWork(Exception):
    """Raised when a search that has found something has used up its budget."""


class Work:
    """The work that a search has done, of what it may do.

    Attributes:
        budget_s: seconds of work; infinite: all that there is to do.
        used_s: those used up.
        may_end: whether something was found, without which a search goes on however long it takes.
        late: whether it was the processor's time that ended the search, on a machine that is slow.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.used_s = budget_s, 0.0
        self.may_end = self.late = False
        self._done: set[Hashable] = set()
        self._until_s = time.process_time() + max(1.0, PROCESSOR_TIMES * budget_s)
        self._next_s = LOOK_S

    def spend_once(self, what: Hashable, seconds: float) -> None:
        """Counts some work unless it was done before, by another search of the sequence."""
        if what not in self._done:
            self._done.add(what)
            self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Counts some work.

        Raises:
            OutOfWork: that was too much, and something was found.
        """
        self.used_s += seconds
        if self.used_s > self._next_s:
            self._next_s = self.used_s + LOOK_S
            self.late = time.process_time() > self._until_s
        if self.may_end and (self.used_s > self.budget_s or self.late):
            raise OutOfWork
