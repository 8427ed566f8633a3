"""Describes the ranks of a run: how many there are, which of them this process runs, and their communicators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whale.config import Config
from whale.distributed.common_seeds import CommonSeeds
from whale.distributed.trace import Trace
from whale.distributed.watch import LauncherWatch
from whale.started import ProcessPlace

# How long a rank waits for what another one does alone, which may take very long: an initializer that is
# computed whole by one rank after the other, a session's set-up on the first rank, a batch that is brought in.
TURN_TIMEOUT_S = 3600.0
# How long ranks wait for each other's files: writing a large model may take its time, and fault.stall_s says who is
# waited for.
WRITE_TIMEOUT_S = 3600.0
# How long ranks wait for the first one's plan, or for what it says of one that does not fit.
PLAN_TIMEOUT_S = 600.0
_T = TypeVar("_T")


@dataclass
class Ranks:
    """The ranks of one run, seen from this process.

    Attributes:
      size: number of ranks.
      ranks: those that this process runs: its own, or all of them with the in-process transport.
      comms: the communicators of these ranks, in the same order; empty when there is one rank only.
      comm_name: the name under which the op library finds them.
      watch: what listens to `whale run` and reports long waits; None when no other process takes part,
        and `whale run` asks for no progress.
      trace: where events of this process's ranks go; None when nobody asks for a trace.
      seeds: for what draws without one, equal on all ranks; None when no other process takes part.
      other_hashes: ranks in which Python's hash of a text is another one than in the first rank.
      rounds_otherwise: whether ranks may compute other last bits than the first, as on another processor.
      ended: whether the run is over; what its variables hold then is all that can be had of them.
    """

    config: Config
    place: ProcessPlace
    size: int
    ranks: tuple[int, ...]
    comms: Sequence[Any]
    comm_name: str
    watch: LauncherWatch | None = None
    trace: Trace | None = None
    seeds: CommonSeeds | None = None
    other_hashes: tuple[int, ...] = ()
    rounds_otherwise: bool = field(default=False, kw_only=True)
    ended: bool = field(default=False, kw_only=True)

    @property
    def rank(self) -> int:
        """Returns the first rank of this process."""
        return self.ranks[0]

    @property
    def is_elastic(self) -> bool:
        """Tells whether this rank goes on when others are gone."""
        return False

    def retry_after_loss(self, call: Callable[[], _T]) -> _T:
        """Calls something that exchanges and returns its result; calls it again where this rank goes on without others.

        The result has to be something that ``msgpack_values.pack`` takes, since another rank may have been told it.
        """
        return call()

    @property
    def has_other_processes(self) -> bool:
        """Tells whether other processes take part."""
        return self.size > len(self.ranks)
