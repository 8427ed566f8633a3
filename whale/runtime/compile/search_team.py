"""Lets ranks with a core of their own help rank 0 in its search for a strategy.

Rank 0 broadcasts messages to all ranks, one after the other, until it has chosen a strategy or failed. Every rank
answers each request, with an empty answer if the request is not for it.

find_together     returns rank 0's strategy on every rank, and its plan on the rank that made it

Decision: 0123.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from whale.cgroup import cpu_quota
from whale.distributed.ranks import PLAN_TIMEOUT_S
from whale.errors import REPORT_FAULT, PlanError
from whale.ir.plan import Plan, plan_from_json
from whale.ir.strategy import ChosenStrategy, ParallelStrategy
from whale.planner.graph_search.predict import Made, Plans
from whale.planner.graph_search.team import Answer, Asked, Member
from whale.runtime.context import Context
from whale_ops.communicator import Communicator

# First byte of rank 0's messages: a request for a prediction or a plan, the chosen strategy, or an error.
_PREDICT, _PLAN, _CHOSEN, _FAILED = b"A", b"P", b"C", b"E"
_BROKEN = b"!"  # begins an answer that is the member's own error


class RankTeam:
    """Represents, on rank 0, the ranks that help it to search; implements `whale.planner.graph_search.team.Team`,
    through which the search asks them for predictions.

    Args:
      comm: communicator of all ranks.
      key: prefix of the keys by which ranks match these messages.
      purpose: describes the search, for errors of ranks that make another call.
      helpers: the ranks that help.
    """

    def __init__(self, comm: Communicator, key: str, purpose: str, helpers: Sequence[int]) -> None:
        self._comm, self._key, self._purpose = comm, key, purpose
        self._helpers = helpers
        self._numbers = count()
        self._number = 0
        self._asked: Sequence[int] = ()
        self.size = 1 + len(helpers)

    def ask(self, ways: Sequence[Asked]) -> None:
        """Sends each helper one strategy to predict; they begin at once, and ``answers`` collects the results.

        Args:
          ways: the strategies to predict, at most one for each helper.
        """
        self._asked = self._helpers[: len(ways)]
        self._say(_PREDICT + msgspec.msgpack.encode(dict(zip(self._asked, ways, strict=True))))

    def answers(self) -> list[Answer]:
        """Returns the predictions of the helpers that were asked last, in the order of the strategies.

        Raises:
          PlanError: a helper failed with an error of its own.
        """
        return [msgspec.msgpack.decode(said, type=Answer) for said in self._collect_answers()]

    def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
        """Returns the plan of a strategy that a helper has predicted, and the predicted peak bytes of the rank with
        most.

        Args:
          member: number of the helper in the team, from 1.
        """
        self._asked = [self._helpers[member - 1]]
        self._say(_PLAN + msgspec.msgpack.encode((self._asked[0], strategy)))
        held_bytes, _, plan = self._collect_answers()[0].partition(b" ")
        return plan_from_json(plan), int(held_bytes)

    def end(self, chosen: ChosenStrategy | None, error: str = "") -> None:
        """Sends all ranks the chosen strategy, or the reason why there is none, which ends their helping."""
        if self._asked:
            try:
                self._collect_answers()
            except PlanError:
                pass  # the first error is told
        self._say(_FAILED + error.encode() if chosen is None else _CHOSEN + msgspec.msgpack.encode(chosen))

    def _say(self, message: bytes) -> None:
        self._number = next(self._numbers)
        self._comm.broadcast_bytes(f"{self._key}/{self._number}", message, purpose=self._purpose)

    def _collect_answers(self) -> list[bytes]:
        """Returns the answers of the ranks that were asked last, in the order in which they were asked."""
        asked, self._asked = self._asked, ()
        said = _answers(self._comm, self._key, self._number, b"", self._purpose)
        for rank in asked:
            if said[rank].startswith(_BROKEN):
                raise PlanError(
                    f"rank {rank} could not predict a plan: {said[rank][1:].decode()}",
                    action=f"{REPORT_FAULT}; a run with mesh.auto_parallel=False does not search",
                )
        return [said[rank] for rank in asked]


def find_together(
    context: Context,
    key: str,
    purpose: str,
    plans: Callable[[], Plans],
    look: Callable[[RankTeam], tuple[ChosenStrategy, Made]],
) -> tuple[ChosenStrategy, Made | None]:
    """Returns on every rank the strategy that ``look`` chooses on rank 0, while other ranks help. Collective between
    processes.

    Args:
      key: prefix of the keys by which ranks match these messages.
      purpose: describes the search, for errors of ranks that make another call.
      plans: creates the object with which a helper plans and prices strategies.
      look: searches on rank 0, given the team; returns the strategy and its plan.

    Returns:
      the strategy; and its plan on the ranks that have made it, None on others.

    Raises:
      PlanError: on every rank, if no strategy was chosen.
    """
    comm = context.comms[0]
    # Where ranks outnumber cores, helping would slow rank 0 down.
    helps = context.place.local_rank < min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)
    said = comm.allgather_bytes(f"{key}/helps", b"1" if helps else b"", PLAN_TIMEOUT_S, purpose)
    if context.rank:
        return _help(comm, key, purpose, plans)
    team = RankTeam(comm, key, purpose, [rank for rank, says in enumerate(said) if says and rank])
    try:
        chosen, made = look(team)
    except Exception as error:
        team.end(None, str(error))
        raise
    team.end(chosen)
    return chosen, made


def _help(comm: Communicator, key: str, purpose: str, plans: Callable[[], Plans]) -> tuple[ChosenStrategy, Made | None]:
    member: Member | None = None
    for number in count():
        data = comm.broadcast_bytes(f"{key}/{number}", None, 0, PLAN_TIMEOUT_S, purpose)
        what, content, answer = data[:1], data[1:], b""
        if what == _FAILED:
            raise PlanError(
                f"rank 0 could not choose a plan: {content.decode()}",
                action=f"do what rank 0's error above says next; if it says nothing, {REPORT_FAULT}",
            )
        if what == _CHOSEN:
            chosen = msgspec.msgpack.decode(content, type=ChosenStrategy)
            best = member.best if member is not None else None
            return chosen, best.made if best is not None and best.strategy == chosen.strategy else None
        try:
            if what == _PREDICT:
                asked = msgspec.msgpack.decode(content, type=dict[int, Asked]).get(comm.rank)
                if asked is not None:
                    member = member or Member(plans())
                    answer = msgspec.msgpack.encode(member.answer(asked))
            else:
                rank, strategy = msgspec.msgpack.decode(content, type=tuple[int, ParallelStrategy])
                if rank == comm.rank and member is not None:
                    plan, held_bytes = member.plan(strategy)
                    answer = b"%d %s" % (held_bytes, plan.to_json())
        except Exception as error:  # rank 0 waits for an answer, whatever it is
            answer = _BROKEN + f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode()
        _answers(comm, key, number, answer, purpose)
    raise AssertionError("this loop ends only when rank 0 sends the message that ends the search")


def _answers(comm: Communicator, key: str, number: int, mine: bytes, purpose: str) -> list[bytes]:
    return comm.allgather_bytes(f"{key}/{number}/answers", mine, PLAN_TIMEOUT_S, purpose)
