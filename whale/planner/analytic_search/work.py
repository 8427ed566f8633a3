"""Counts the work of a search, so that what a search finds does not depend on how busy the machine is.

The unit is the second: each step of a search counts as the seconds that it takes on one idle core, on every machine.
Processor time ends a search only if it exceeds the counted work several times over.

Decisions: 0158, 0222, 0224, 0225.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

# Seconds of one core for: the estimate of a candidate; the layers' costs on a kind of rank; a bound of a strategy by
# its passes, and each stage of it; a stage's passes, memory and cost, computed, and its cost and recomputation, cached.
ESTIMATE_S, LAYERS_S, BOUND_S, KEY_S = 6e-6, 2.8e-4, 2.2e-5, 1.2e-6
PASSES_S, MEMORY_S, COST_S, LOOKUP_S, CHOOSE_S = 8e-5, 2.5e-5, 1e-4, 2e-6, 1e-6
# For: a change that is listed, and each stage of it; one whose stages get layers; a random change; a strategy whose
# step is simulated, and a pass of it; a check whether layers fit into a stage; a stage of a cut; an array element of
# the exact search.
MOVE_S, MEAN_S, DIVIDE_S, RANDOM_S, EVALUATE_S = 5e-5, 6e-7, 3e-5, 3e-5, 1.2e-4
PASS_S, FIT_S, CUT_S, ELEMENT_S = 1e-8, 2e-5, 4e-6, 5e-9
PROCESSOR_TIMES = 5  # processor time ends a search at this times the budget
LOOK_S = 0.05  # seconds of work between two looks at the processor time
# Seconds of work after which the best strategy so far is settled for the first time, and by what they grow each time.
# The most work of it, as a part of all work before.
SETTLE_S, SETTLE_TIMES, SETTLE_PART = 1.0, 1.9, 0.3
# Seconds of work before the best strategy is converted for the first time; the least part by which a strategy is faster
# than the one that was converted last, and the least work between two conversions, in times what one takes.
CONVERT_S, CONVERT_GAIN, CONVERT_TIMES = 0.5, 1e-3, 8.0


class OutOfWork(Exception):
    """Raised when a search has used up its budget and has found at least one strategy."""


class Work:
    """Counts the work that searches have done against their common budget.

    Attributes:
        budget_s: seconds of work allowed; infinite: no limit.
        used_s: seconds of work counted so far.
        polishing_s: of it, on moving layers of strategies that had just become the best.
        best_s: shortest step that any of the searches has found.
        settle_s: seconds of work after which that strategy is settled next.
        settle: settles it; takes the seconds of work at which to end.
        convert_s: seconds of work after which a new best strategy is converted to other numbers of ranks that divide
            tokens (`context`).
        converted_s: step of the strategy that was converted last.
        convert: converts it.
        may_end: a strategy was found, so that the budget may end the search.
        late: processor time, not the budget, has ended the search, because the machine is slow.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.used_s = budget_s, 0.0
        self.polishing_s, self.best_s = 0.0, math.inf
        self.settle_s = SETTLE_S
        self.settle: Callable[[float], None] | None = None
        self.convert_s, self.converted_s = CONVERT_S, math.inf
        self.convert: Callable[[], object] | None = None
        self.may_end = self.late = False
        self._done: set[Hashable] = set()
        self._until_s = time.process_time() + max(1.0, PROCESSOR_TIMES * budget_s)
        self._next_s = LOOK_S

    def settle_if_due(self) -> None:
        """Settles the best strategy so far, if so much work was done that this is due."""
        if self.settle is not None and self.may_end and self.used_s > self.settle_s:
            while self.used_s > self.settle_s:
                self.settle_s *= SETTLE_TIMES
            self.settle(self.used_s * (1 + SETTLE_PART))

    def convert_if_due(self) -> None:
        """Converts the best strategy so far, if it is a new one and conversions have not taken much of the work."""
        if self.convert is None or not self.may_end or self.used_s < self.convert_s:
            return
        if self.best_s < self.converted_s * (1 - CONVERT_GAIN):
            began_s, self.convert_s, self.converted_s = self.used_s, math.inf, self.best_s
            self.convert()
            self.convert_s = self.used_s + CONVERT_TIMES * (self.used_s - began_s)

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
