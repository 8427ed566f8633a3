"""Tracks which ranks a run has as some go and others come, and decides whether joining ranks are taken in.

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

_STEPS = 9  # the median of so many steps is a step's time
KEPT = 2  # committed states that are kept: ranks are at most one call apart


@dataclass
class Members:
    """The ranks of an elastic run, by their numbers: first those it started with, then those that joined.

    Attributes:
      started: number of ranks that the run started with.
      inside: the ranks that take part: those that started, and those that have been admitted since.
      changes: the losses and joins announced to all ranks so far.
      addresses: addresses on which the first ranks listen, if they have no MPI in common.
    """

    started: int
    inside: set[int]
    changes: Sequence[RankChange] = ()
    addresses: Mapping[int, str] = field(default_factory=dict)

    @property
    def present(self) -> tuple[int, ...]:
        """Returns those that are not gone, also if they have not been taken in."""
        numbers = set(range(self.started)).union(*(change.joined or () for change in self.changes))
        return tuple(sorted(numbers.difference(change.gone for change in self.changes if change.gone is not None)))

    @property
    def active(self) -> tuple[int, ...]:
        """Returns those that are not gone, and have been taken in."""
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
        """Connects some of the ranks by a communicator.

        Args:
          kind: 0 to 3; tells it from others after the same changes.
          door: where ranks that were not started together connect; None: all were.
          shared: as of ``whale_ops.connect_survivors``.

        Raises:
          CommError: one of them is gone.
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
    """States that the script has committed, by the number of calls that it had made then.

    Attributes:
      steps_left: how many it has still to take, if it knows.
    """

    held: dict[int, Callable[[], bytes]] = field(default_factory=dict)
    steps_left: int | None = None

    def keep(self, calls: int, state: Callable[[], bytes], steps_left: int | None = None) -> None:
        """Keeps a state: the script has come to where another process can take it up."""
        self.held.pop(calls, None)
        self.held[calls], self.steps_left = state, steps_left
        while len(self.held) > KEPT:
            del self.held[next(iter(self.held))]


class StepTimes:
    """The seconds that steps take, and that it takes to become other ranks, as this rank has seen them.

    Attributes:
      moving_s: from the latest change of ranks, or the first call of all, to the end of the next step, what is compiled
        for it included.
      declined: the ranks that were there when joining ranks were last not worth it.
    """

    def __init__(self) -> None:
        self.moving_s = 0.0
        self.declined: tuple[int, ...] = ()
        self._begun_s, self._changed = 0.0, True
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self) -> None:
        """Records that a call begins."""
        self._begun_s = time.perf_counter()

    def begin_change(self) -> None:
        """Records that the ranks become others now, in the call that goes on."""
        self._begun_s, self._changed = time.perf_counter(), True

    def end(self, stepped: bool) -> None:
        """Records that the call has come to its end; ``stepped``: whether it took a step."""
        took_s = time.perf_counter() - self._begun_s
        if stepped and self._changed:
            self.moving_s, self._changed = took_s, False
            self._steps_s.clear()
        elif stepped:
            self._steps_s.append(took_s)

    def weigh(self, steps_left: int | None) -> tuple[float, float] | None:
        """Returns (seconds of all steps that are left, seconds to become others); None: it is not known."""
        if steps_left is None or not self._steps_s:
            return None
        return steps_left * statistics.median(self._steps_s), self.moving_s


def is_worthwhile(weighed: tuple[float, float] | None, ranks: int, there: int, tell: bool) -> bool:
    """Tells whether it pays to go from ``ranks`` ranks to all that are ``present``, those that join being as fast.

    Args:
      weighed: as of ``StepTimes.weigh``; None: it does, as far as is known.
      tell: whether what is known is logged.
    """
    if weighed is None:
        return True
    left_s, moving_s = weighed
    saved_s = left_s * (1 - ranks / there)
    if tell:
        are = "are taken in" if saved_s > moving_s else "are not taken in"
        log.info(
            f"{there - ranks} ranks that have come {are}: it would save {saved_s:.3g} s "
            f"of {left_s:.3g} s that are left, and take {moving_s:.3g} s"
        )
    return saved_s > moving_s


@dataclass(frozen=True)
class CommonState:
    """All by which the ranks of a run decide alike without asking each other; joining ranks receive it.

    What decides something and is not in here has to be equal in a process that has just begun.

    Attributes:
      programs, elements: how many there were.
      divisions: how often rows were divided anew; shares: of the rows, by rank, or [].
      balance: what looks at their speeds have left.
    """

    programs: int
    elements: int
    divisions: int
    shares: list[int]
    balance: BalanceHistory

    def to_values(self) -> tuple[Any, ...]:
        """Returns it as plain values, to be sent."""
        return self.programs, self.elements, self.divisions, self.shares, astuple(self.balance)

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> CommonState:
        """Reads what `to_values` gave."""
        programs, elements, divisions, shares, balance = values
        return cls(programs, elements, divisions, shares, BalanceHistory(*balance))


@dataclass(frozen=True)
class Welcome:
    """A message to a joining rank: how far the others are, and what they have agreed on.

    Attributes:
      calls, steps: made and taken.
      state: what the script has committed.
      common: all by which they decide.
    """

    calls: int
    steps: int
    state: bytes
    common: CommonState


def extend_shares(shares: Sequence[int], size: int) -> list[int]:
    """Extends shares of rows by those of joining ranks, of whose speed nothing is known: as large as the others' on
    average.
    """
    if not shares:
        return []
    return [*shares, *[max(1, round(sum(shares) / len(shares)))] * (size - len(shares))]
