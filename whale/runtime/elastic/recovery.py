"""Recovers whole variables from the pieces and copies of the remaining ranks, after as many steps as possible.

All ranks decide alike, because each has what all ranks have said. The state after the latest step is taken if every
remaining rank has completed this step, and every piece exists after it, on a rank that holds it or on the one that
keeps its copy. Otherwise all ranks go back to the state before the step.

Decision: 0107.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

import whale_ops
from whale.distributed.faults import raise_comm_error
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import ClusterError
from whale.runtime.elastic.agreement import LoneCommunicator
from whale.runtime.elastic.generations import Generations, Snapshot
from whale.runtime.variables.ownership import Holding

_Key = tuple[int, int]  # (variable, piece)
_Said = Sequence[dict[_Key, bool]]  # for each rank of the meeting: piece that it has -> whether that is a copy
_Found = dict[_Key, Callable[[], tf.Tensor]]  # piece -> function that returns it, perhaps from another rank's memory
WHOLE = -1  # stands for a piece's number where a rank has the whole value


@dataclass(frozen=True)
class RecoveredState:
    """Holds whole values of variables after a number of steps, as ``recover`` returns them.

    Attributes:
      steps: number of steps.
      values: of the variables, in the order in which programs first used them.
      back: whether some ranks had taken one more step, which is repeated.
      joined: how many variables were assembled from parts and copies.
    """

    steps: int
    values: Sequence[tf.Tensor]
    back: bool
    joined: int


def recover(
    meeting: whale_ops.Communicator | LoneCommunicator, generations: Generations, latest: int, taken: int
) -> RecoveredState:
    """Recovers whole variables on all ranks of a meeting; collective.

    Args:
      meeting: temporary communicator of the remaining ranks.
      generations: this rank's snapshots and copies.
      latest: the largest number of steps that any of the ranks has taken.
      taken: the smallest number of steps that any of the ranks has taken: ``latest``, or one less.

    Raises:
      ClusterError: pieces are lost with all ranks that had them.
      CommError: one more rank is gone.
    """
    missing: list[str] = []
    for wanted in [latest] * (taken == latest) + [latest - 1]:
        own, copies, moment = _find_available(generations, wanted, wanted < latest)
        found = {**copies, **own}
        mine = pack((len(moment.holdings), [(key, key not in own) for key in found]))
        every = [unpack(one) for one in meeting.allgather_bytes("whale/elastic/pieces", mine, TURN_TIMEOUT_S)]
        count, said = min(known for known, _ in every), [dict(keys) for _, keys in every]
        missing = _list_missing(said, moment, count)
        if not missing:
            try:
                values = _exchange_pieces(meeting, found, said, moment, count)
                joined = sum(bool(_find_needs(said, moment, i)) for i in range(count))
                return RecoveredState(wanted, values, wanted < latest, joined)
            except tf.errors.OpError as error:
                raise_comm_error(error, generations.ranks)
                raise
    raise ClusterError(
        "parts of variables are lost with all ranks that had them",
        variable=missing[0],
        given=f"{len(missing)} variables of which the remaining ranks do not have every part",
        expected="that between two steps a rank and the rank that keeps its copies are not both lost",
        action="start again from a checkpoint: `whale run --max-restarts`",
    )


def become_whole(holdings: Sequence[Holding], recovered: RecoveredState | None) -> None:
    """Makes every variable an ordinary, replicated one with its recovered value. A variable without a recovered value,
    which no common step has used, gets back its state before any step.

    Args:
      holdings: of the variables, in the order of the recovered values.
      recovered: None: every rank has all values already.
    """
    values = () if recovered is None else recovered.values
    for i, holding in enumerate(holdings):
        if i >= len(values):
            holding.make_new()
        elif recovered is not None and (recovered.back or holding.has_parts):
            holding.make_whole(values[i])


def describe_going_on(count: int) -> str:
    """Returns "1 rank goes on" or "3 ranks go on", for a log line."""
    return "1 rank goes on" if count == 1 else f"{count} ranks go on"


def describe_lost(recovered: RecoveredState | None) -> str:
    """Returns in words whether a step was lost with ranks, and how many variables were assembled, for a log line.

    Args:
      recovered: None if every rank had all values.
    """
    back = recovered is not None and recovered.back
    what = "the last of which they take again" if back else "none of which is lost"
    if recovered is not None and recovered.joined:
        what += f"; {recovered.joined} variables are assembled from parts and copies of parts"
    return what


def _find_available(generations: Generations, steps: int, back: bool) -> tuple[_Found, _Found, Snapshot]:
    """Returns what this rank can contribute to the state after ``steps`` steps.

    Args:
      steps: number of steps.
      back: whether other ranks have taken one more step, so that this is a state to go back to.

    Returns:
      its own pieces; its copies of other ranks' pieces; and the snapshot with what the script had assigned after these
      steps.
    """
    rank = generations.rank
    moment = generations.begun.get(steps + 1) or generations.read_now()
    # If a rank was lost before copies of the latest step were sent, there is no snapshot after it: read it now.
    after = moment if back else generations.taken.get(steps, moment)
    known = min(len(after.holdings), len(moment.holdings))
    own: _Found = {}
    for i, (holding, value) in enumerate(zip(after.holdings[:known], after.values)):
        if value is not None and (piece := holding.find_piece(rank)) is not None:
            own[i, piece] = partial(tf.identity, value)
        if (whole := moment.assigned.get(holding.key)) is not None:
            own[i, WHOLE] = partial(tf.identity, whole)
    every = generations.copies.get(steps, ())
    copied = {(i, piece): value for copies in every for i, piece, value in copies.iterate_pieces() if i < known}
    return own, copied, Snapshot(moment.holdings[:known], moment.values[:known], moment.assigned)


def _find_holders(said: _Said, key: _Key) -> list[int]:
    """Returns the ranks of the meeting that can provide a piece: first those that hold it, then those that keep a copy.

    Args:
      said: for each rank, the pieces that it has -> whether it has a copy only.
      key: (index of the variable, number of the piece).
    """
    return sorted((rank for rank, keys in enumerate(said) if key in keys), key=lambda rank: said[rank][key])


def _find_needs(said: _Said, moment: Snapshot, i: int) -> list[int]:
    """Returns the numbers of the pieces of variable ``i`` that must be broadcast; [] if every rank has its whole value.

    Args:
      said: for each rank, the pieces that it has -> whether it has a copy only.
      moment: tells into how many pieces the variable is cut.
    """
    pieces = range(len(moment.holdings[i].holders))
    whole = len(_find_holders(said, (i, WHOLE))) == len(said) or (
        len(pieces) == 1 and len(_find_holders(said, (i, 0))) == len(said)
    )
    return [] if whole else list(pieces)


def _list_missing(said: _Said, moment: Snapshot, count: int) -> list[str]:
    """Returns the names of those of the first ``count`` variables that cannot be recovered, because no remaining rank
    has one of their pieces.
    """
    return [
        moment.holdings[i].variable.name
        for i in range(count)
        if any(not _find_holders(said, (i, piece)) for piece in _find_needs(said, moment, i))
    ]


def _exchange_pieces(
    meeting: whale_ops.Communicator | LoneCommunicator,
    found: _Found,
    said: _Said,
    moment: Snapshot,
    count: int,
) -> list[tf.Tensor]:
    """Broadcasts each needed piece from a rank that has it, and returns the whole values of the first ``count``
    variables; collective.

    Args:
      found: (index of the variable, number of the piece) -> function that returns the piece, for the pieces of this
        rank.
      said: for each rank, the pieces that it has -> whether it has a copy only.
      moment: this rank's snapshot, with the variables' layouts.
      count: number of variables that all ranks know.
    """
    ops, values = whale_ops.load_ops(), []
    comm = ops.whale_communicator(communicator=meeting.name, rank=meeting.rank) if meeting.size > 1 else None
    for i in range(count):
        holding = moment.holdings[i]
        pieces = []
        for piece in _find_needs(said, moment, i):
            root = _find_holders(said, (i, piece))[0]
            mine = found[i, piece]() if root == meeting.rank else tf.zeros((0,), holding.dtype)
            if comm is None:
                pieces.append(mine)
                continue
            (value,) = ops.whale_broadcast(
                comm=comm,
                inputs=[mine],
                key=f"whale/elastic/{i}/{piece}",
                root=root,
                shapes=[],
                ranks=[],
            )
            pieces.append(value)
        if (i, WHOLE) in found:
            values.append(found[i, WHOLE]())
        elif pieces:
            values.append(holding.assemble(pieces))
        else:  # one piece that every rank has, some as a copy
            values.append(found[i, 0]() if moment.values[i] is None else moment.values[i])
    return values
