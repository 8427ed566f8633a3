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
    """Represents the ranks of one run as seen from this process.

    Attributes:
      config: the configuration of the run.
      place: the place of this process among the processes of the run.
      size: number of ranks.
      ranks: the ranks that this process runs: its own, or all of them if the ranks are threads (in-process transport).
      comms: the communicators of `ranks`, in the same order; empty if there is one rank only.
      comm_name: name by which TensorFlow ops find these communicators.
      watch: the connection to `whale run`, which also reports long waits; None if no other process takes part, and
        `whale run` asks for no progress.
      trace: writes the events of this process's ranks; None if no trace was asked for.
      seeds: gives equal seeds to all ranks; None if no other process takes part.
      other_hashes: ranks whose Python string hashes differ from the first rank's.
      rounds_otherwise: whether ranks may round differently from the first one, as on another processor.
      ended: whether the run is over; variables then hold what they held at its end.
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
        """Returns the number of this process's first rank."""
        return self.ranks[0]

    @property
    def is_elastic(self) -> bool:
        """Returns True if the run goes on without lost ranks; a subclass implements it."""
        return False

    def retry_after_loss(self, call: Callable[[], _T]) -> _T:
        """Calls a function that communicates and returns its result; an elastic run calls it again after a loss of
        ranks.

        Args:
          call: the function. Its result must be something that ``msgpack_values.pack`` takes, because a rank that
            already has the result sends it to the others.
        """
        return call()

    @property
    def has_other_processes(self) -> bool:
        """Returns True if ranks of the run are in other processes."""
        return self.size > len(self.ranks)
