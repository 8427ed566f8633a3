"""Lets the remaining ranks of an elastic run agree before they continue, and brings a rank that is one step behind up
to date.

After each loss or join, the present ranks connect by a temporary communicator, the meeting. Each sends a
``RankStatement``, and they take their decisions by ``Agreements``.

Decision: 0109.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale.distributed.joining import CommonState
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import ClusterError
from whale.runtime.elastic.call_replay import CallProgress


class LoneCommunicator:
    """Stands in for a communicator on the only rank that remains: exchanges return its own data."""

    rank, size, name = 0, 1, ""

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str = "") -> list[bytes]:
        """Returns ``[data]``, as there is no other rank."""
        return [data]


# Kinds of decisions after one loss or join, in order: from which step to continue, that all variables are whole, which
# ranks are admitted, and, any number of times, that the same ranks plan anew.
MET, WHOLE, GROWN, ANEW, _KINDS = range(5)
_TIMES = 1 << 20  # the most times that ranks may plan anew after one loss or join


class Agreements:
    """Carries out decisions that all ranks of a meeting take together: each rank first gets all the data that it needs,
    and acts only after all have.

    If a rank is lost in between, some ranks may have acted and others not yet. The remaining ranks then meet again, and
    those that have not acted do so if any rank of the new meeting has.
    """

    def __init__(self) -> None:
        self._number = self._done = 0
        self._act: Callable[[], None] = lambda: None

    def agree(self, news: int, kind: int, meeting: Any, act: Callable[[], None], time: int = 0) -> None:
        """Calls ``act`` once all ranks of the meeting are ready for it; collective.

        Args:
          news: number of losses and joins heard so far, equal on all ranks of the meeting.
          kind: what is decided: MET (from which step to continue), WHOLE (all variables are whole), GROWN (ranks are
            admitted) or ANEW (the same ranks plan anew).
          meeting: communicator of the ranks that decide.
          act: carries out the decision on this rank, without exchanges.
          time: tells apart decisions of the same kind after the same loss or join: 0, 1, ...

        Raises:
          CommError: a rank is gone. The decision is carried out in the next meeting, or by no rank.
        """
        self._number, self._act = _TIMES * (_KINDS * news + kind + 1) + time, act
        gather_bytes(meeting, b"")
        self._do()

    def catch_up(self, meeting: Any) -> None:
        """Calls the ``act`` of this rank's latest ``agree`` if that failed here, but another rank of the meeting has
        already acted; collective. Ranks that have never agreed, such as joining ones, only take part in the exchange.
        """
        done = max(int(one) for one in gather_bytes(meeting, str(self._done).encode()))
        if self._done < done == self._number:
            self._do()

    def _do(self) -> None:
        self._act()
        self._done, self._act = self._number, lambda: None


@dataclass
class RankStatement:
    """Represents what a remaining rank tells the others when they meet.

    Attributes:
      calls: number of its calls that communicated.
      steps: number of its steps.
      variables: number of variables that its programs have used.
      host: name of its host.
      keeps: whether it has snapshots of its variables from before and after its latest steps.
      weighed: the result of ``StepTimes.weigh``, from which rank 0 decides whether admitting ranks pays; None: unknown.
      common: counters and shares that must become equal on all ranks.
    """

    calls: int
    steps: int
    variables: int
    host: str
    keeps: bool  # whether what it held before and after its latest steps is known
    weighed: tuple[float, float] | None  # as of ``Times.weigh``
    common: CommonState

    def to_values(self) -> tuple[Any, ...]:
        """Returns the statement as plain values, to be sent."""
        return self.calls, self.steps, self.variables, self.host, self.keeps, self.weighed, self.common.to_values()

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> RankStatement:
        """Returns the statement that ``to_values`` has turned into plain values."""
        calls, steps, variables, host, keeps, weighed, common = values
        return cls(calls, steps, variables, host, keeps, weighed, CommonState.from_values(common))


def hear_returned(meeting: Any, said: Sequence[RankStatement], me: int, at: CallProgress) -> None:
    """Sends the result of the latest call that was not a step to ranks that have not completed this call; collective.

    Args:
      meeting: communicator of the remaining ranks.
      said: the statements of all ranks of the meeting, in order.
      me: number of this rank in the meeting.
      at: this rank's progress; updated if this rank is behind.

    Raises:
      ClusterError: ranks are further apart than one call.
    """
    calls, steps = max(one.calls for one in said), max(one.steps for one in said)
    if min(one.calls for one in said) < calls - 1 or min(one.steps for one in said) < steps - 1:
        raise ClusterError(
            "the remaining ranks are at different steps",
            given=f"(calls made, steps taken) by each: {[(one.calls, one.steps) for one in said]}",
            expected="a difference of at most one call and one step, since every step exchanges something",
            action="start again from a checkpoint: `whale run --max-restarts`",
        )
    if any(one.calls < calls for one in said):
        first = next(rank for rank, one in enumerate(said) if one.calls == calls)
        returned = send_value(meeting, first, at.returned if me == first else None)
        if said[me].calls < calls and said[me].steps == steps:
            at.returned, at.calls = returned, calls


def catch_up(
    meeting: Any, said: Sequence[RankStatement], me: int, at: CallProgress, known: Sequence[tf.Variable]
) -> None:
    """Sends the results of the latest step, and the variables, to ranks that have not completed this step; collective.
    For runs whose variables are all replicated.

    Args:
      meeting: communicator of the remaining ranks.
      said: the statements of all ranks of the meeting, in order.
      me: number of this rank in the meeting.
      at: this rank's progress; updated if this rank is behind.
      known: variables that programs have used, in an order that is equal on all ranks.
    """
    steps = max(one.steps for one in said)
    if any(one.steps < steps for one in said):
        first = next(rank for rank, one in enumerate(said) if one.steps == steps)
        common = known[: min(one.variables for one in said)]
        results = send_value(meeting, first, [t.numpy() for t in at.results or ()])
        values = [send_value(meeting, first, variable.numpy()) for variable in common]
        if said[me].steps < steps:  # all values are received before any is assigned, in case another rank is lost
            for variable, value in zip(common, values):
                variable.assign(np.asarray(value))
            at.results, at.steps = [tf.constant(value) for value in results], steps


def gather_bytes(meeting: Any, data: bytes) -> list[bytes]:
    """Returns the data of every rank of a meeting, in order of ranks; collective."""
    purpose = "going on with the ranks that are left"
    return list(meeting.allgather_bytes("whale/elastic", data, TURN_TIMEOUT_S, purpose))


def send_value(meeting: Any, first: int, value: Any) -> Any:
    """Broadcasts ``value`` from rank ``first`` of a meeting, and returns it on every rank; collective. Other ranks'
    ``value`` is ignored.
    """
    data = pack(value) if meeting.rank == first else None
    return unpack(meeting.broadcast_bytes("whale/elastic/sent", data, first, TURN_TIMEOUT_S))
