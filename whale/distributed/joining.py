"""Tracks which ranks an elastic run has as some go and others join, and decides whether joining ranks are admitted.

Decision: 0114.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import whale_ops
from whale.distributed.balance import BalanceHistory
from whale.distributed.listener import RankListener
from whale.distributed.watch import LauncherWatch, RankChange
from whale.log import log

_STEPS = 9  # the median of the last steps, this many, counts as the time of a step
KEPT = 2  # number of committed states that are kept, since ranks are at most one call apart


@dataclass
class Members:
    """Tracks the ranks of an elastic run by the numbers they were started with: 0, 1, ... at the start of the run, and
    the next free numbers for joining ranks.

    Attributes:
      started: number of ranks that the run started with.
      inside: numbers of the ranks that take part: those of the start, and those admitted since. Lost ranks are not
        removed.
      changes: the losses and joins that `whale run` has announced to all ranks so far.
      addresses: rank -> address at which it listens, for the ranks of the start, if these have no MPI in common; else
        empty.
    """

    started: int
    inside: set[int]
    changes: Sequence[RankChange] = ()
    addresses: Mapping[int, str] = field(default_factory=dict)

    @property
    def present(self) -> tuple[int, ...]:
        """Returns the numbers of the ranks that are not gone, including joining ranks that are not admitted yet,
        ascending.
        """
        numbers = set(range(self.started)).union(*(change.joined or () for change in self.changes))
        return tuple(sorted(numbers.difference(change.gone for change in self.changes if change.gone is not None)))

    @property
    def active(self) -> tuple[int, ...]:
        """Returns the numbers of the ranks that are not gone and have been admitted, ascending."""
        return tuple(rank for rank in self.present if rank in self.inside)

    def connect(
        self,
        name: str,
        me: int,
        members: Sequence[int],
        kind: int,
        door: RankListener | None,
        watch: LauncherWatch,
        **shared: Any,
    ) -> whale_ops.Communicator:
        """Connects some of the ranks, this one among them, by a new communicator; collective among them.

        Args:
          name: prefix of the communicator's name, equal on all ranks.
          me: number of this rank.
          members: numbers of the ranks to connect, ascending.
          kind: 0 to 3: makes the communicator's name unique among those created between two changes of the ranks.
          door: this rank's listener; None if all members were started together and share an MPI.
          watch: reports further losses, which end the attempt.
          shared: ``share_memory`` and ``hosts`` as for ``whale_ops.connect_survivors``.

        Raises:
          CommError: one of the members is gone.
        """
        group = 4 * len(self.changes) + kind
        name = f"{name}.{group}"
        if members[-1] < self.started and not self.addresses:
            return whale_ops.connect_survivors(name, members, group, **shared)
        assert door is not None
        latest = next((change.addresses for change in reversed(self.changes) if change.addresses), {})
        addresses = {**self.addresses, **{int(rank): address for rank, address in latest.items()}}
        known = len(self.changes)
        sockets = door.connect_group(
            group, me, members, addresses, lambda: watch.is_over or len(watch.list_changes(0, 0.0)) > known
        )
        return whale_ops.connect_over_sockets(name, members.index(me), sockets, **shared)


@dataclass
class Commits:
    """Holds the latest states that the script has committed (``wh.State``), from which joining ranks can start.

    Positions in the script are counted in collective calls: steps, and other calls that all ranks make together.

    Attributes:
      held: position of the commit (number of collective calls before it) -> a function that returns the packed state.
      steps_left: number of steps that the script still has to take; None if it does not say.
    """

    held: dict[int, Callable[[], bytes]] = field(default_factory=dict)
    steps_left: int | None = None

    def keep(self, calls: int, state: Callable[[], bytes], steps_left: int | None = None) -> None:
        """Stores the state that the script has just committed, and drops all but the last `KEPT`.

        Args:
          calls: number of collective calls that the script has made so far.
          state: returns the packed state.
          steps_left: number of steps still to take; None: unknown.
        """
        self.held.pop(calls, None)
        self.held[calls], self.steps_left = state, steps_left
        while len(self.held) > KEPT:
            del self.held[next(iter(self.held))]


class StepTimes:
    """Measures how long this rank's steps take, and how long a change of the set of ranks takes, to decide whether
    joining ranks are admitted.

    Attributes:
      moving_s: seconds that the latest change of ranks took, to the end of the first step after it, compilation
        included; before any change, the seconds of the first step.
      declined: the ranks that were present when joining ranks were last refused, since admitting them would not have
        saved time.
    """

    def __init__(self) -> None:
        self.moving_s = 0.0
        self.declined: tuple[int, ...] = ()
        self._begun_s, self._changed = 0.0, True
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self) -> None:
        """Starts the clock, at the beginning of a collective call of the script, which may be a step."""
        self._begun_s = time.perf_counter()

    def begin_change(self) -> None:
        """Starts the clock anew, since the set of ranks changes now, during a collective call."""
        self._begun_s, self._changed = time.perf_counter(), True

    def end(self, stepped: bool) -> None:
        """Stops the clock, at the end of the collective call.

        Args:
          stepped: whether the call was a step; other calls are not recorded.
        """
        took_s = time.perf_counter() - self._begun_s
        if stepped and self._changed:
            self.moving_s, self._changed = took_s, False
            self._steps_s.clear()
        elif stepped:
            self._steps_s.append(took_s)

    def weigh(self, steps_left: int | None) -> tuple[float, float] | None:
        """Returns what ``is_worthwhile`` compares: (seconds that all remaining steps take, seconds that a change of
        ranks takes).

        Returns None if no step has been timed, or the number of remaining steps is unknown.

        Args:
          steps_left: number of steps that the script still has to take; None: unknown.
        """
        if steps_left is None or not self._steps_s:
            return None
        return steps_left * statistics.median(self._steps_s), self.moving_s


def is_worthwhile(weighed: tuple[float, float] | None, ranks: int, there: int, tell: bool) -> bool:
    """Returns True if admitting joining ranks saves more time in the remaining steps than the change takes.

    Joining ranks are assumed to be as fast as the present ones.

    Args:
      weighed: what ``StepTimes.weigh`` returned; None: unknown, the function returns True.
      ranks: number of ranks that take part now.
      there: number of ranks after the change: those that take part, and those that wait to join.
      tell: whether to log the decision and its figures.
    """
    if weighed is None:
        return True
    left_s, moving_s = weighed
    saved_s = left_s * (1 - ranks / there)
    if tell:
        are = "are admitted" if saved_s > moving_s else "are not admitted"
        log.info(
            f"{there - ranks} joining ranks {are}: that would save {saved_s:.3g} s of the {left_s:.3g} s that the "
            f"remaining steps take, and the change itself would take {moving_s:.3g} s"
        )
    return saved_s > moving_s


@dataclass(frozen=True)
class CommonState:
    """Holds all counters and figures by which the ranks decide alike without asking each other; joining ranks receive
    it.

    Any other input of such decisions has to be the same in a process that has just started.

    Attributes:
      programs: number of programs compiled so far.
      elements: number of exchanges of dataset elements and seeds so far; part of the keys of these exchanges.
      divisions: how often rows were divided again, or ranks admitted.
      shares: each rank's share of the rows of a batch, by rank; [] for equal shares.
      balance: history of the comparisons of the ranks' speeds.
    """

    programs: int
    elements: int
    divisions: int
    shares: list[int]
    balance: BalanceHistory

    def to_values(self) -> tuple[Any, ...]:
        """Returns the fields as plain values that `msgpack_values.pack` can send."""
        return self.programs, self.elements, self.divisions, self.shares, astuple(self.balance)

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> CommonState:
        """Creates the state from what `to_values` returned."""
        programs, elements, divisions, shares, balance = values
        return cls(programs, elements, divisions, shares, BalanceHistory(*balance))


@dataclass(frozen=True)
class Welcome:
    """Holds the message with which a joining rank is admitted: how far the other ranks are, and what they have agreed
    on.

    Attributes:
      calls: number of collective calls (steps and others) that the script of the other ranks has made.
      steps: number of steps taken.
      state: the state that the script has committed (``wh.State``), packed.
      common: the counters and figures by which the ranks decide alike.
    """

    calls: int
    steps: int
    state: bytes
    common: CommonState


def extend_shares(shares: Sequence[int], size: int) -> list[int]:
    """Extends shares of rows to `size` ranks: a joining rank, whose speed is unknown, gets the others' mean."""
    if not shares:
        return []
    return [*shares, *[max(1, round(sum(shares) / len(shares)))] * (size - len(shares))]
