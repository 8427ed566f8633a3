"""Lets the remaining ranks agree before they continue, and lets a rank that is a step behind catch up.

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
    """A communicator of a single rank."""

    rank, size, name = 0, 1, ""

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str = "") -> list[bytes]:
        """Returns the data of the one rank."""
        return [data]


# What ranks agree on after one piece of news, in order: from where they go on, that all variables are whole, who is in,
# and, any number of times, that the same ranks plan anew.
MET, WHOLE, GROWN, ANEW, _KINDS = range(5)
_TIMES = 1 << 20  # ranks may plan anew so many times after one piece of news


class Agreements:
    """Decisions that ranks take together: each of them first gets all that it needs to act, then acts.

    If one is lost in between, some have acted, and the others could have. All remaining ones meet then, and a rank that
    has not acted does so if any rank has.
    """

    def __init__(self) -> None:
        self._number = self._done = 0
        self._act: Callable[[], None] = lambda: None

    def agree(self, news: int, kind: int, meeting: Any, act: Callable[[], None], time: int = 0) -> None:
        """Acts once all ranks of a meeting are ready to.

        Args:
          news: number of losses and joins heard so far.
          time: number of the agreement among those of this kind.

        Raises:
          CommError: one of them is gone. The decision is carried out in the next meeting, or by no rank.
        """
        self._number, self._act = _TIMES * (_KINDS * news + kind + 1) + time, act
        gather_bytes(meeting, b"")
        self._do()

    def catch_up(self, meeting: Any) -> None:
        """Acts on what others have acted on, if this rank has agreed on it: a joining rank may not have."""
        done = max(int(one) for one in gather_bytes(meeting, str(self._done).encode()))
        if self._done < done == self._number:
            self._do()

    def _do(self) -> None:
        self._act()
        self._done, self._act = self._number, lambda: None


@dataclass
class RankStatement:
    """A statement of a remaining rank: the numbers of its calls and steps, and the news it has heard."""

    calls: int
    steps: int
    variables: int
    host: str
    keeps: bool  # whether what it held before and after its latest steps is known
    weighed: tuple[float, float] | None  # as of ``Times.weigh``
    common: CommonState

    def to_values(self) -> tuple[Any, ...]:
        """Returns it as plain values, to be sent."""
        return self.calls, self.steps, self.variables, self.host, self.keeps, self.weighed, self.common.to_values()

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> RankStatement:
        """Reads what `to_values` gave."""
        calls, steps, variables, host, keeps, weighed, common = values
        return cls(calls, steps, variables, host, keeps, weighed, CommonState.from_values(common))


def hear_returned(meeting: Any, said: Sequence[RankStatement], me: int, at: CallProgress) -> None:
    """Sends the result of the latest call to ranks that are one call behind; collective.

    Raises:
      ClusterError: ranks are further apart than one call.
    """
    calls, steps = max(one.calls for one in said), max(one.steps for one in said)
    if min(one.calls for one in said) < calls - 1 or min(one.steps for one in said) < steps - 1:
        raise ClusterError(
            "the remaining ranks are at different steps",
            given=f"(calls made, steps taken) by each: {[(one.calls, one.steps) for one in said]}",
            expected="at most one between them, since every step exchanges something",
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
    """Sends the results of the latest step, and the variables, to ranks that are one step behind; collective."""
    steps = max(one.steps for one in said)
    if any(one.steps < steps for one in said):
        first = next(rank for rank, one in enumerate(said) if one.steps == steps)
        common = known[: min(one.variables for one in said)]
        results = send_value(meeting, first, [t.numpy() for t in at.results or ()])
        values = [send_value(meeting, first, variable.numpy()) for variable in common]
        if said[me].steps < steps:  # all has come: nobody has half of it, if one more is gone
            for variable, value in zip(common, values):
                variable.assign(np.asarray(value))
            at.results, at.steps = [tf.constant(value) for value in results], steps


def gather_bytes(meeting: Any, data: bytes) -> list[bytes]:
    """Returns the data of every rank of a meeting."""
    purpose = "going on with the ranks that are left"
    return list(meeting.allgather_bytes("whale/elastic", data, TURN_TIMEOUT_S, purpose))


def send_value(meeting: Any, first: int, value: Any) -> Any:
    """Returns the value of rank ``first`` of a meeting, on every rank of it."""
    data = pack(value) if meeting.rank == first else None
    return unpack(meeting.broadcast_bytes("whale/elastic/sent", data, first, TURN_TIMEOUT_S))
