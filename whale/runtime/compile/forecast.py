"""Compares what steps take with what `auto_parallel` predicted, and searches anew if the prediction was far off.

All ranks compare after the same steps. If steps are much slower or faster than predicted, as under another profile, on
another link, or beside other programs, the search is repeated with figures that explain what was measured. Its result
is cached for later runs. This run changes to it as soon as that saves more than it costs, assuming that as many steps
are still to come as there were. The first rank logs this in one line. If steps are near their prediction, and ranks may
lend the first one their cores, a step of one rank on the cores of all is measured for comparison, once steps have taken
as long as that measurement will.

Decisions: 0185, 0199, 0200.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import CommError, WhaleError
from whale.ir.plan_text import format_bytes
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.planner.graph_search.environment import Slowdown
from whale.runtime.compile.auto import SearchedAgain
from whale_ops import Communicator
from whale_ops.communicator import NO_EXCHANGES

_T = TypeVar("_T")
# STEPS steps are measured after the FIRST ones, which compile and touch memory for the first time. Steps are far off
# their prediction if the two differ by more than a factor of FAR and by more than FAR_S seconds.
FIRST, STEPS = 4, 8
FAR, FAR_S = 2.0, 2e-3
# About the most that measuring a step of one rank on the cores of all takes: LENDING_S and LENDING_STEPS first steps.
LENDING_S, LENDING_STEPS = 1.0, 2.0
MOST_MOVES = 3  # changes of a run to another strategy, so that unsteady measurements cannot make it change for ever
PURPOSE = "comparing steps with their prediction"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Holds what one rank has measured of the steps that are compared with their prediction.

    Attributes:
      step_s: median seconds of a step.
      first_s: seconds of the very first step, which includes preparations.
      exchanges_s: key of an exchange -> its seconds in a step, including waits for other ranks.
      sent_bytes: bytes that this rank sends in a step.
    """

    step_s: float
    first_s: float
    exchanges_s: dict[str, float]
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class StepsTook:
    """Holds what all ranks together have measured of the steps that are compared with their prediction.

    Attributes:
      step_s: seconds of a step on the rank that waits least; on the slowest rank if nothing is exchanged.
      first_s: seconds of the very first step, on the slowest rank.
      exchanges_s: seconds of one rank's exchanges in a step, without its waits for other ranks. An exchange counts with
        its time on the rank where it is shortest; of the ranks' sums, this is the largest.
    """

    step_s: float
    first_s: float
    exchanges_s: float

    @classmethod
    def agree(cls, said: Sequence[StepTimes]) -> StepsTook:
        """Combines the measurements of all ranks, which every rank has received, so that all decide alike."""
        shortest: dict[str, float] = {}
        for one in said:
            for key, seconds in one.exchanges_s.items():
                shortest[key] = min(seconds, shortest.get(key, seconds))
        exchanges_s = max(sum(shortest[key] for key in one.exchanges_s) for one in said)
        step_s = find_step_s([(one.step_s, bool(one.exchanges_s)) for one in said])
        return cls(step_s, max(one.first_s for one in said), min(step_s, exchanges_s))


def find_step_s(said: Sequence[tuple[float, bool]]) -> float:
    """Returns the seconds of a step of all ranks together.

    A rank whose input comes late starts late, and others wait for it in their first exchange; so the shortest step
    counts, or the longest if nothing is exchanged.

    Args:
      said: for each rank, its seconds of a step, and whether the step exchanges anything.
    """
    return (min if any(exchanges for _, exchanges in said) else max)(step_s for step_s, _ in said)


def is_far(step_s: float, predicted_s: float, far: float = FAR) -> bool:
    """Returns True if steps took more than ``far`` times as long as predicted, or less than 1/``far`` of it, and the
    difference is more than FAR_S seconds.
    """
    longer, shorter = max(step_s, predicted_s), min(step_s, predicted_s)
    return longer > far * shorter and longer - shorter > FAR_S


@dataclass
class StepForecast:
    """Holds the prediction for one program of a run, and compares its steps with it; there is one on every rank.

    Attributes:
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      step_s: predicted seconds of a step.
      comm: communicator of the ranks.
      search: searches a faster strategy, given what all ranks have measured, and whether that is near the prediction
        (then only a step that rank 0 computes on the cores of all ranks is measured for comparison). None: the user
        gave the strategy, or there were searches enough.
      correct: caches another strategy for later runs; with None, makes the next run search anew.
      moving_s: returns the seconds that it takes to move variables to another strategy, and ""; or infinity and the
        reason why they cannot move.
      may_lend: whether such a step is still to be measured: ranks may lend the first one their cores, and do not yet.
      better: the strategy to change to, once that pays; None: there is none.
    """

    number: int
    step_s: float
    comm: Communicator
    search: Callable[[StepsTook, bool], SearchedAgain] | None
    correct: Callable[[ChosenStrategy | None], None]
    moving_s: Callable[[SearchedAgain], tuple[float, str]]
    may_lend: bool = False
    better: ChosenStrategy | None = None
    _name: str = ""
    _times_s: list[float] = field(default_factory=list)
    _calls: int = 0
    _before: dict[str, tuple[float, int]] = field(default_factory=dict)
    _first_s: float = 0.0
    _pays_after: float = 0.0  # number of steps after which changing to `better` pays
    _measured: StepTimes | None = None
    _lending_after: float = math.inf  # number of steps after which one rank on the cores of all is measured

    def watch_steps(self, call: Callable[..., _T], name: str, number: int) -> Callable[..., _T]:
        """Returns a callable that calls ``call`` and times the first steps; returns ``call`` itself for other programs
        than the predicted one.
        """
        if number != self.number:
            return call
        self._name = name

        def take_step(*args: Any) -> _T:
            if self._calls >= FIRST + STEPS:
                self._calls += 1
                return call(*args)
            if self._calls == FIRST:
                self._before = self._count_exchanges()
            started_s = time.perf_counter()
            result = call(*args)
            took_s = time.perf_counter() - started_s
            if not self._calls:
                self._first_s = took_s
            self._calls += 1
            if self._calls > FIRST:
                self._times_s.append(took_s)
            return result

        return take_step

    def look(self) -> ChosenStrategy | None:
        """Compares steps with their prediction, if enough steps were taken, and returns the strategy to change to now,
        or None.

        Called after each step; collective when it is time to compare.

        Raises:
          CommError: a rank is gone.
        """
        if self._calls == FIRST + STEPS and self._times_s:
            self._compare()
        if self._calls >= self._lending_after and self._measured is not None:
            self._lending_after = math.inf
            self._look_again(self._measured, is_near=True)
        if self.better is None or self._calls < self._pays_after:
            return None
        better, self.better = self.better, None
        return better

    def _count_exchanges(self) -> dict[str, tuple[float, int]]:
        """Returns key -> (seconds of an exchange so far, bytes that this rank has sent in it), for exchanges that move
        data.
        """
        return {
            c.key: (c.seconds, c.wire_bytes)
            for c in self.comm.counters()
            if c.logical_bytes > 0 and not c.key.startswith(NO_EXCHANGES)
        }

    def _measure(self) -> StepTimes:
        exchanges_s, sent_bytes = dict[str, float](), 0
        for key, (seconds, sent) in self._count_exchanges().items():
            seconds_before, sent_before = self._before.get(key, (0.0, 0))
            if seconds > seconds_before:
                exchanges_s[key] = (seconds - seconds_before) / STEPS
                sent_bytes += sent - sent_before
        return StepTimes(statistics.median(self._times_s), self._first_s, exchanges_s, sent_bytes // STEPS)

    def _compare(self) -> None:
        self._measured, self._times_s = self._measure(), []
        mine = self._measured
        brief = pack((mine.step_s, bool(mine.exchanges_s), mine.first_s, self.step_s, self.may_lend))
        said = [unpack(one) for one in self.comm.allgather_bytes("whale/forecast", brief, TURN_TIMEOUT_S, PURPOSE)]
        step_s, first_s = find_step_s([(one[0], one[1]) for one in said]), max(one[2] for one in said)
        self.step_s = said[0][3]
        if is_far(step_s, self.step_s):
            self._look_again(mine, is_near=False)
        elif self.search is not None and all(one[4] for one in said):
            self._lending_after = (LENDING_S + LENDING_STEPS * first_s) / step_s

    def _look_again(self, mine: StepTimes, is_near: bool) -> None:
        """Searches another strategy with the measured times, caches the result, and decides when to change to it;
        collective.

        Args:
          mine: what this rank has measured.
          is_near: True if steps were near their prediction, so that only a step that rank 0 computes on the cores of
            all ranks is measured for comparison.
        """
        search, self.search = self.search, None
        whole = pack((mine.step_s, mine.first_s, mine.exchanges_s, mine.sent_bytes))
        every = self.comm.allgather_bytes("whale/forecast/far", whole, TURN_TIMEOUT_S, PURPOSE)
        took = StepsTook.agree([StepTimes(*unpack(one)) for one in every])
        found, why = _search(search, took, is_near)
        if not is_near or found is not None:
            self.correct(found.chosen if found is not None and found.is_whole else None)
        if found is not None:
            why = self._weigh(found, took)
        if self.comm.rank == 0 and (not is_near or self.better is not None):
            log.warning(f"auto_parallel: {self._describe(took, mine.sent_bytes)}; {why}")

    def _weigh(self, found: SearchedAgain, took: StepsTook) -> str:
        """Decides whether the time that the found strategy saves will exceed the time of changing to it, and after how
        many steps; returns the decision in words, for the log.
        """
        gain_s = found.present_s - found.chosen.step_s
        measured, slower = "one rank was measured on the cores of all", found.slower
        if slower != Slowdown():
            measured = f"computing takes {slower.computing:.3g} and exchanging {slower.exchanging:.3g} times as long"
            measured += " as the machine's figures predict"
        if gain_s <= 0:
            return f"measured again, {measured}, and no other strategy is predicted to be faster"
        better = f"`{found.chosen.strategy.name}` is predicted to take {1e3 * found.chosen.step_s:.4g} ms"
        moving_s, why = self.moving_s(found)
        if why:
            return f"{measured}, and {better}, but {why}: the next run takes it"
        # Waiting until as many steps were taken as pay for the change costs at most twice as much as the best moment
        # would, whatever the number of steps that are still to come.
        self._pays_after = (found.took_s + took.first_s + moving_s) / gain_s
        self.better = found.chosen
        later = f" after {math.ceil(self._pays_after)} steps" if self._pays_after > self._calls else ""
        return f"{measured}: {better}, and the run goes over to it{later}"

    def _describe(self, took: StepsTook, sent_bytes: int) -> str:
        share = took.exchanges_s / took.step_s
        return (
            f"steps of `{self._name}` take {1e3 * took.step_s:.4g} ms, where {1e3 * self.step_s:.4g} ms were "
            f"predicted; exchanges go on during {100 * share:.0f} % of that, in which this rank sends "
            f"{format_bytes(sent_bytes)} a step"
        )


def _search(
    search: Callable[[StepsTook, bool], SearchedAgain] | None, took: StepsTook, near: bool
) -> tuple[SearchedAgain | None, str]:
    """Searches another strategy; an error in the search does not end the run.

    Args:
      search: as in ``StepForecast``; None: no search is allowed.
      took: what all ranks have measured.
      near: whether that is near the prediction.

    Returns:
      the result and ""; or None and the reason why the present strategy stays.
    """
    if search is None:
        return None, "links or processors are not as fast as when the strategy was chosen (see `whale doctor`)"
    try:
        return search(took, near), ""
    except CommError:
        raise
    except WhaleError as error:
        return None, f"no other strategy was found ({error.message}), and the next run searches one"
