"""Lets the remaining ranks of an elastic run agree before they continue, and brings a rank that is one step behind up
to date.

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
    """Stands for a communicator where a single rank remains: exchanges return its own data."""

    rank, size, name = 0, 1, ""

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str = "") -> list[bytes]:
        """Returns ``[data]``, as there is no other rank."""
        return [data]


# Kinds of decisions after one loss or join, in order: from which step to continue, that all variables are whole, which
# ranks are admitted, and, any number of times, that the same ranks plan anew.
MET, WHOLE, GROWN, ANEW, _KINDS = range(5)
_TIMES = 1 << 20  # the most times that ranks may plan anew after one loss or join


class Agreements:
    """Carries out decisions that all ranks of a meeting take together: each first gets all the data that it needs, and
    then acts.

    If a rank is lost in between, some ranks have acted and the others have not, but could. The remaining ranks then
    meet again, and a rank that has not acted does so if any other rank has.
    """

    def __init__(self) -> None:
        self._number = self._done = 0
        self._act: Callable[[], None] = lambda: None

    def agree(self, news: int, kind: int, meeting: Any, act: Callable[[], None], time: int = 0) -> None:
        """Calls ``act`` once all ranks of the meeting are ready for it.

        Args:
          news: number of losses and joins heard so far.
          kind: of the decision: MET, WHOLE, GROWN or ANEW.
          meeting: temporary communicator of the ranks, through which they agree before they continue.
          act: carries out the decision on this rank, without exchanges.
          time: number of the decision among those of this kind.

        Raises:
          CommError: a rank is gone. The decision is carried out in the next meeting, or by no rank.
        """
        self._number, self._act = _TIMES * (_KINDS * news + kind + 1) + time, act
        gather_bytes(meeting, b"")
        self._do()

    def catch_up(self, meeting: Any) -> None:
        """Carries out the decision that this rank agreed to last, if another rank of the meeting already has; a joining
        rank may not have agreed to it.
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
      weighed: figures of ``StepTimes.weigh`` by which joining is weighed; None: unknown.
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
    """Sends the result of the latest call that was not a step to ranks that are one call behind; collective.

    Args:
      said: the statements of all ranks of the meeting.
      me: number of this rank in the meeting.
      at: this rank's progress; updated if it is behind.

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
    """Sends the results of the latest step, and the variables, to ranks that are one step behind; collective. For runs
    whose variables are all replicated.

    Args:
      said: the statements of all ranks of the meeting.
      me: number of this rank in the meeting.
      at: this rank's progress; updated if it is behind.
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
    """Broadcasts the value of rank ``first`` of a meeting and returns it on every rank; collective."""
    data = pack(value) if meeting.rank == first else None
    return unpack(meeting.broadcast_bytes("whale/elastic/sent", data, first, TURN_TIMEOUT_S))
