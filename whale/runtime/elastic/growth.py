"""Ranks that come: who is there after what `whale run` has told all ranks, and what a newcomer is told by others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import whale_ops
from whale.runtime.elastic.door import Door
from whale.runtime.ranks.watch import Change, Watch

KEPT = 2  # of what the script has committed: ranks are at most one call apart


@dataclass
class Members:
    """The ranks of a run, by the numbers that they were started as.

    Attributes:
      started: how many the run has begun with.
      inside: those of them, and of those that have come since, that have been taken in.
      changes: what has been told to all so far.
    """

    started: int
    inside: set[int]
    changes: Sequence[Change] = ()

    @property
    def there(self) -> tuple[int, ...]:
        """Those that are not gone, also if they have not been taken in."""
        numbers = set(range(self.started)).union(*(change.joined or () for change in self.changes))
        return tuple(sorted(numbers.difference(change.gone for change in self.changes if change.gone is not None)))

    @property
    def left(self) -> tuple[int, ...]:
        """Those that are not gone, and have been taken in."""
        return tuple(rank for rank in self.there if rank in self.inside)

    def communicator(
        self, name: str, me: int, members: Sequence[int], kind: int, door: Door | None, watch: Watch, **shared: Any
    ) -> whale_ops.Communicator:
        """A communicator of some of them.

        Args:
          kind: 0 to 3; tells it from others after the same changes.
          door: where ranks that were not started together connect; None: all were.
          shared: as of ``whale_ops.survivors``.

        Raises:
          CommError: one of them is gone.
        """
        group = 4 * len(self.changes) + kind
        name = f"{name}.{group}"
        if members[-1] < self.started:
            return whale_ops.survivors(name, members, group, **shared)
        assert door is not None
        latest = next(change.addresses for change in reversed(self.changes) if change.addresses)
        addresses = {int(rank): address for rank, address in latest.items()}
        known = len(self.changes)
        sockets = door.connected(
            group, me, members, addresses, lambda: watch.over or len(watch.changes(0, 0.0)) > known
        )
        return whale_ops.over_sockets(name, members.index(me), sockets, **shared)


@dataclass
class Commits:
    """What the script has committed, by the number of calls that it had made then."""

    held: dict[int, Callable[[], bytes]] = field(default_factory=dict)

    def keep(self, calls: int, state: Callable[[], bytes]) -> None:
        """The script has come to where another process can take it up."""
        self.held.pop(calls, None)
        self.held[calls] = state
        while len(self.held) > KEPT:
            del self.held[next(iter(self.held))]


@dataclass(frozen=True)
class Welcome:
    """What a newcomer is told: how far the others are, and what they have agreed on.

    Attributes:
      calls, steps: made and taken.
      programs, elements: how many there were.
      divisions: how often rows were divided anew; shares: of the rows, by rank, or [].
      state: what the script has committed.
    """

    calls: int
    steps: int
    programs: int
    elements: int
    divisions: int
    shares: list[int]
    state: bytes


def shares_with(shares: Sequence[int], size: int) -> list[int]:
    """Shares of rows with those of newcomers, of whose speed nothing is known: as large as the others' on average."""
    if not shares:
        return []
    return [*shares, *[max(1, round(sum(shares) / len(shares)))] * (size - len(shares))]
