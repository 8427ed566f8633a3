"""What ranks held before and after their latest steps, each its own pieces and those of another: none is lost with it.

A rank that is gone takes pieces with it which nobody else has. So after each step every rank sends such pieces to
another one, on another host where there is one. The others may be a step apart when it goes. Then those that are ahead
go back, for which each keeps what it held before the step; that is free until the step writes, and then as much memory
as the rank's own pieces.

Moment        a rank's pieces at one moment
Copies        of pieces of other ranks, after a number of steps
Generations   the last two of each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.runtime.ranks.faults import raise_comm_error
from whale.runtime.ranks.ranks import Ranks
from whale.runtime.variables.holdings import Holding
from whale.runtime.variables.owner import VariableOwner

ALONE_BYTES = 64 << 10  # from here on a piece is a message of its own: to bring it together with others takes longer


@dataclass(frozen=True)
class Moment:
    """This rank's pieces.

    Attributes:
      holdings: of all variables known then.
      values: the piece of each, None where this rank has none.
      assigned: handle's number -> the whole value of which the script had it cut just before.
    """

    holdings: Sequence[Holding]
    values: Sequence[tf.Tensor | None]
    assigned: Mapping[int, tf.Tensor]


@dataclass(frozen=True)
class _Message:
    """Pieces that one rank alone has, sent together: one large one as it lies, or small ones of a dtype in a row."""

    rank: int
    key: str
    dtype: tf.DType
    pieces: Sequence[tuple[int, int, tuple[int, ...]]]  # (number of the holding, of the piece, its shape)

    @property
    def elements(self) -> int:
        """How many all of it has."""
        return sum(math.prod(shape) for *_, shape in self.pieces)

    def packed(self, mine: Sequence[tf.Tensor | None]) -> tf.Tensor:
        """What is sent, of this rank's piece of every holding."""
        rows = [tf.reshape(mine[i], [-1]) for i, *_ in self.pieces]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 0)

    def unpacked(self, row: tf.Tensor) -> Iterator[tuple[int, int, tf.Tensor]]:
        """(number of the holding, of the piece, the piece)."""
        begin = 0
        for i, piece, shape in self.pieces:
            count = math.prod(shape)
            yield i, piece, tf.reshape(row[begin : begin + count], shape)
            begin += count


class Copies:
    """Of the pieces that some other ranks alone had. ``received``: messages with what has come of them."""

    def __init__(self, received: Sequence[tuple[_Message, tf.Tensor]]) -> None:
        self._received = received

    def pieces(self) -> Iterator[tuple[int, int, tf.Tensor]]:
        """(number of the holding, of the piece, the piece)."""
        for message, row in self._received:
            yield from message.unpacked(row)


@dataclass(frozen=True)
class _Layout:
    """How the variables lie; what reads this rank's pieces, and what also sends them to the rank that keeps copies."""

    holdings: Sequence[Holding]
    read: Callable[[], Any]
    exchange: Callable[[], Any]


class Generations:
    """The latest moments and copies of this rank.

    Args:
      hosts: of every rank, the name of its host.
      copies: whether pieces are sent; otherwise only what several ranks have outlives one of them.

    Attributes:
      rank: this one, of ``ranks``.
      begun, taken: number of a step -> what this rank held when it began, and when it was taken.
      copies: number of steps -> pieces of other ranks after so many.
    """

    def __init__(self, ranks: Ranks, variables: VariableOwner, hosts: Sequence[str], copies: bool) -> None:
        self.ranks, self._variables, self.rank = ranks, variables, ranks.rank
        self._keepers = tuple(_keeper(rank, hosts) for rank in range(ranks.size)) if copies else ()
        self.begun: dict[int, Moment] = {}
        self.taken: dict[int, Moment] = {}
        self.copies: dict[int, list[Copies]] = {}
        self._layouts: dict[Any, _Layout] = {}
        self._latest: Any = None

    def before(self, step: int, assigned: Mapping[int, tf.Tensor]) -> None:
        """Step number ``step`` is about to begin; collective where the variables lie otherwise than before.

        Args:
          assigned: handle's number -> whole value of which the pieces were just cut.
        """
        before, layout = self._latest, self._layout()
        if self._latest != before:
            self._copied(step - 1, layout)
        self.begun[step] = Moment(layout.holdings, self._by_place(layout.read(), layout), assigned)
        self.begun.pop(step - 2, None)

    def after(self, step: int) -> None:
        """It was taken; collective."""
        layout = self._layout()
        for holding in layout.holdings:
            holding.forget_first()
        self.taken.clear()
        self.taken[step] = Moment(layout.holdings, self._copied(step, layout), {})
        self.copies.pop(step - 2, None)

    def now(self) -> Moment:
        """What this rank holds; not collective."""
        holdings = self._variables.holdings(self.ranks.size)
        values = _by_place(_present(holdings, self.rank), holdings, self.rank)
        given = {holding.key: whole for holding in holdings if (whole := holding.assigned()) is not None}
        return Moment(holdings, values, given)

    def rewritten(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """(variable, value) of those to which the script has given a value since the latest step was taken."""
        step, taken = max(self.taken.items(), key=lambda item: item[0])
        now, found = self.begun.get(step + 1) or self.now(), []
        for holding, before, after in zip(taken.holdings, taken.values, now.values):
            if (given := now.assigned.get(holding.key)) is not None:
                found.append((holding.variable, given))
            elif holding.is_everywhere and not _are_equal(before, after):
                found.append((holding.variable, after))
        return found

    def _layout(self) -> _Layout:
        """How the variables lie now."""
        holdings, rank = self._variables.holdings(self.ranks.size), self.rank
        self._latest = tuple((holding.key, holding.holders) for holding in holdings)
        if self._latest not in self._layouts:
            read = tf.function(lambda: _present(holdings, rank), autograph=False)
            exchange = tf.function(lambda: self._exchanged(holdings), autograph=False)
            made = _Layout(holdings, read.get_concrete_function(), exchange.get_concrete_function())
            self._layouts[self._latest] = made
        return self._layouts[self._latest]

    def _by_place(self, values: Sequence[tf.Tensor], layout: _Layout) -> list[tf.Tensor | None]:
        return _by_place(values, layout.holdings, self.rank)

    def _copied(self, steps: int, layout: _Layout) -> list[tf.Tensor | None]:
        """Sends copies; this rank's own pieces."""
        try:
            values, rows = layout.exchange()
        except tf.errors.OpError as error:
            raise_comm_error(error, self.ranks)
            raise
        self.copies.setdefault(steps, []).append(Copies(list(zip(self._kept(layout.holdings), rows))))
        return self._by_place(values, layout)

    def _exchanged(self, holdings: Sequence[Holding]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """In a graph: this rank's pieces, and those of the ranks for which it keeps copies."""
        ops, rank = whale_ops.ops(), self.rank
        values = _present(holdings, rank)
        if not self._keepers:
            return values, []
        comm = ops.whale_communicator(communicator=self.ranks.comm_name, rank=rank)
        mine = _by_place(values, holdings, rank)
        for message in _messages(holdings, rank):
            ops.whale_send(comm=comm, input=message.packed(mine), key=message.key, peer=self._keepers[rank])
        found = [
            ops.whale_recv(comm=comm, key=kept.key, peer=kept.rank, shape=[kept.elements], T=kept.dtype)
            for kept in self._kept(holdings)
        ]
        return values, found

    def _kept(self, holdings: Sequence[Holding]) -> list[_Message]:
        """What this rank keeps for others."""
        of = [rank for rank, keeper in enumerate(self._keepers) if keeper == self.rank]
        return [message for rank in of for message in _messages(holdings, rank)]


def _are_equal(before: tf.Tensor | None, after: tf.Tensor | None) -> bool:
    return before is None or after is None or np.array_equal(before.numpy(), after.numpy())


def _keeper(rank: int, hosts: Sequence[str]) -> int:
    """The rank that keeps copies for a rank: the next one on another host, or the next one."""
    others = [(rank + i) % len(hosts) for i in range(1, len(hosts))]
    return next((other for other in others if hosts[other] != hosts[rank]), others[0])


def _messages(holdings: Sequence[Holding], rank: int) -> list[_Message]:
    """Those with all pieces that a rank alone has."""
    small: dict[tf.DType, list[tuple[int, int, tuple[int, ...]]]] = {}
    found = []
    for i, holding in enumerate(holdings):
        if (piece := holding.alone(rank)) is None:
            continue
        one = i, piece, holding.shape(piece)
        if math.prod(one[2]) * holding.dtype.size >= ALONE_BYTES:
            found.append(_Message(rank, f"whale/copies/{rank}/{i}", holding.dtype, [one]))
        else:
            small.setdefault(holding.dtype, []).append(one)
    return found + [_Message(rank, f"whale/copies/{rank}/{dtype.name}", dtype, few) for dtype, few in small.items()]


def _present(holdings: Sequence[Holding], rank: int) -> list[tf.Tensor]:
    own = [holding for holding in holdings if holding.piece(rank) is not None]
    return [gen_resource_variable_ops.read_variable_op(holding.handle(rank), holding.dtype) for holding in own]


def _by_place(values: Sequence[tf.Tensor], holdings: Sequence[Holding], rank: int) -> list[tf.Tensor | None]:
    left = iter(values)
    return [next(left) if holding.piece(rank) is not None else None for holding in holdings]
