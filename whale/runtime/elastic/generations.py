"""Keeps a rank's pieces of variables from before and after its latest steps, and copies of other ranks' pieces, so that
no value is lost with a rank.

A piece is what one rank holds of a variable: a tile of a sharded one, or else the whole. A lost rank may have had
pieces that no other rank has. So after each step every rank sends such pieces to another rank, on another host if there
is one. A rank on the same machine that maps the sender's memory gets their address instead: that memory outlives the
process, and is not overwritten while it is lent. When a rank is lost, the others may be one step apart; those that are
ahead then go back, for which each rank keeps its pieces from before the step. That is free until the step writes, and
then takes as much memory as the rank's own pieces.

Snapshot      a rank's pieces at one moment
PieceCopies   pieces of other ranks, after a number of steps
Generations   the last two of each

Decision: 0100.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.distributed.faults import raise_comm_error
from whale.distributed.ranks import Ranks
from whale.runtime.variables.ownership import Holding
from whale.runtime.variables.variable_store import VariableStore

ALONE_BYTES = 64 << 10  # a larger piece is sent by itself, because concatenating it takes longer than a message
# Smaller tensors are not allocated in memory that peers map (whale_ops/tf_kernels/memory/arena_allocator.cc).
LENT_BYTES = 256 << 10


@dataclass(frozen=True)
class Snapshot:
    """Holds this rank's pieces (shards, or whole values of unsharded variables) of all variables at one moment.

    Attributes:
      holdings: for each variable known then, which rank holds which piece.
      values: this rank's piece of each variable; None where it has none.
      assigned: Python's ``id`` of a variable's handle -> the whole value that the script had assigned just before, from
        which the pieces were cut.
    """

    holdings: Sequence[Holding]
    values: Sequence[tf.Tensor | None]
    assigned: Mapping[int, tf.Tensor]


@dataclass(frozen=True)
class _PieceMessage:
    """Describes a message with pieces that only one rank has: a large piece by itself, or small ones of one dtype
    concatenated.

    Attributes:
      rank: the sender.
      key: by which sender and receiver match the message.
      dtype: of the pieces.
      lent: whether the receiver reads the pieces in the sender's memory instead of getting a copy.
    """

    rank: int
    key: str
    dtype: tf.DType
    pieces: Sequence[tuple[int, int, tuple[int, ...]]]  # (number of the holding, of the piece, its shape)
    lent: bool = False

    @property
    def elements(self) -> int:
        """Returns the number of elements of all pieces."""
        return sum(math.prod(shape) for *_, shape in self.pieces)

    def pack(self, mine: Sequence[tf.Tensor | None]) -> tf.Tensor:
        """Returns the content of the message as one tensor: this rank's pieces, flattened and concatenated in the order
        of ``pieces``. A single piece that the receiver reads in place (``lent``) is returned as it is.

        Args:
          mine: this rank's piece of each holding (a variable's value that ranks keep in pieces); None where it has
              none.
        """
        if self.lent and len(self.pieces) == 1:
            return mine[self.pieces[0][0]]
        return tf.concat([tf.reshape(mine[i], [-1]) for i, *_ in self.pieces], 0)

    def unpack(self, row: Callable[[], tf.Tensor]) -> Iterator[tuple[int, int, Callable[[], tf.Tensor]]]:
        """Yields each piece in the message as (index of the variable that it is a piece of, number of the piece among
        those of the variable, function that returns the piece's value).

        Args:
          row: returns the tensor that ``pack`` made.
        """
        begin = 0
        for i, piece, shape in self.pieces:
            end = begin + math.prod(shape)
            yield i, piece, functools.partial(_cut_piece, row, begin, end, shape)
            begin = end


class PieceCopies:
    """Holds copies of pieces that only one other rank had.

    Args:
      received: messages, each with a function that returns its data.
    """

    def __init__(self, received: Sequence[tuple[_PieceMessage, Callable[[], tf.Tensor]]]) -> None:
        self._received = received

    def iterate_pieces(self) -> Iterator[tuple[int, int, Callable[[], tf.Tensor]]]:
        """Yields each copied piece as (index of its variable's holding, number of the piece, function that returns its
        value).
        """
        for message, row in self._received:
            yield from message.unpack(row)


@dataclass(frozen=True)
class _Layout:
    """Holds which rank has which pieces of the variables now, with the function that reads this rank's pieces and
    exchanges copies.

    Attributes:
      holdings: for each variable, which rank holds which piece.
      places: indices in ``holdings`` of the variables of which this rank has a piece.
      handles: resource handles through which these pieces are read.
      exchange: reads the pieces, and sends or lends them to the rank that keeps their copies.
      kept: messages from other ranks whose pieces this rank keeps.
    """

    holdings: Sequence[Holding]
    places: Sequence[int]
    handles: Sequence[Any]
    exchange: Callable[[], Any]
    kept: Sequence[_PieceMessage]

    def read(self) -> list[tf.Tensor]:
        """Returns the values of this rank's pieces, in the order of ``places``."""
        return _read_values([self.holdings[i].dtype for i in self.places], self.handles)

    def distribute_pieces(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Returns a list with an entry for every holding, this rank's piece or None where it has none.

        Args:
          values: this rank's pieces, in the order of ``places``.
        """
        found: list[tf.Tensor | None] = [None] * len(self.holdings)
        for i, value in zip(self.places, values):
            found[i] = value
        return found


class Generations:
    """Holds this rank's snapshots of its latest steps, and the copies that it keeps for other ranks; ``Elastic``
    records them around each step, and ``recover`` uses them after a loss.

    Args:
      ranks: of the run.
      variables: of the run.
      hosts: of every rank, the name of its host.
      copies: whether pieces are copied to another rank; if not, only pieces that several ranks have survive a loss.

    Attributes:
      rank: this rank.
      begun: number of a step -> the snapshot from before it.
      taken: number of a step -> the snapshot from after it.
      copies: number of steps -> pieces of other ranks after these steps.
    """

    def __init__(self, ranks: Ranks, variables: VariableStore, hosts: Sequence[str], copies: bool) -> None:
        self.ranks, self._variables, self.rank = ranks, variables, ranks.rank
        self._comm = ranks.comms[0]
        self._keepers = tuple(_find_keeper(rank, hosts) for rank in range(ranks.size)) if copies else ()
        self.begun: dict[int, Snapshot] = {}
        self.taken: dict[int, Snapshot] = {}
        self.copies: dict[int, list[PieceCopies]] = {}
        self._lent: dict[int, list[Any]] = {}  # number of steps -> lent tensors, kept alive so that they stay in place
        self._layouts: dict[Any, _Layout] = {}
        self._latest: _Layout | None = None

    def record_before(self, step: int, assigned: Mapping[int, tf.Tensor]) -> None:
        """Takes a snapshot before step number ``step``; collective if the variables' layout has changed, as copies are
        then exchanged.

        Args:
          assigned: Python's ``id`` of a variable's handle -> whole value from which the pieces were just cut.
        """
        before, layout = self._latest, self._find_layout()
        if layout is not before:
            self._exchange_copies(step - 1, layout)
        self.begun[step] = Snapshot(layout.holdings, layout.distribute_pieces(layout.read()), assigned)
        self.begun.pop(step - 2, None)

    def record_after(self, step: int) -> None:
        """Takes a snapshot after step number ``step``, and exchanges copies; collective."""
        layout = self._find_layout()
        for holding in layout.holdings:
            holding.forget_first()
        self.taken.clear()
        self.taken[step] = Snapshot(layout.holdings, self._exchange_copies(step, layout), {})
        for kept in (self.copies, self._lent):
            kept.pop(step - 2, None)

    def read_now(self) -> Snapshot:
        """Returns a snapshot of this rank's variables as they are now, without keeping it; not collective."""
        holdings = self._variables.list_holdings(self.ranks.size)
        own = [holding if holding.find_piece(self.rank) is not None else None for holding in holdings]
        values = [
            None if one is None else gen_resource_variable_ops.read_variable_op(one.handle(self.rank), one.dtype)
            for one in own
        ]
        given = {holding.key: whole for holding in holdings if (whole := holding.find_assigned()) is not None}
        return Snapshot(holdings, values, given)

    def list_rewritten(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns the (variable, value) pairs that the script has assigned since the latest step."""
        step, taken = max(self.taken.items(), key=lambda item: item[0])
        now, found = self.begun.get(step + 1) or self.read_now(), []
        for holding, before, after in zip(taken.holdings, taken.values, now.values):
            if (given := now.assigned.get(holding.key)) is not None:
                found.append((holding.variable, given))
            elif holding.is_everywhere and not _is_equal(before, after):
                found.append((holding.variable, after))
        return found

    def _find_layout(self) -> _Layout:
        """Returns the present layout of the variables; the same object while no layout changes."""
        holdings, rank = self._variables.list_holdings(self.ranks.size), self.rank
        if self._latest is None or self._latest.holdings is not holdings:
            lie = tuple((holding.key, holding.holders) for holding in holdings)
            if lie not in self._layouts:
                places = [i for i, holding in enumerate(holdings) if holding.find_piece(rank) is not None]
                handles = [holdings[i].handle(rank) for i in places]
                exchange = tf.function(lambda: self._build_exchange(holdings), autograph=False).get_concrete_function()
                self._layouts[lie] = _Layout(holdings, places, handles, exchange, self._list_kept(holdings))
            self._layouts[lie] = self._latest = replace(self._layouts[lie], holdings=holdings)
        return self._latest

    def _exchange_copies(self, steps: int, layout: _Layout) -> list[tf.Tensor | None]:
        """Sends or lends this rank's pieces to the rank that keeps their copies, and keeps those of other ranks.
        Collective.

        Returns:
          this rank's piece of every holding, None where it has none.
        """
        try:
            values, lends, rows, places = layout.exchange()
        except tf.errors.OpError as error:
            raise_comm_error(error, self.ranks)
            raise
        self._lent.setdefault(steps, []).append(lends)
        sent, where = iter(rows), iter([int(place) for few in places for place in few.numpy()])
        received: list[tuple[_PieceMessage, Callable[[], tf.Tensor]]] = []
        for message in layout.kept:
            lent = functools.partial(self._read, message, next(where)) if message.lent else None
            received.append(
                (message, functools.partial(_return_row, next(sent)) if lent is None else functools.cache(lent))
            )
        self.copies.setdefault(steps, []).append(PieceCopies(received))
        return layout.distribute_pieces(values)

    def _read(self, message: _PieceMessage, place: int) -> tf.Tensor:
        """Returns a message's pieces, read at the address ``place`` of the memory that another rank has lent."""
        row = np.empty(message.elements, message.dtype.as_numpy_dtype)
        self._comm.read_lent(message.rank, place, row.view(np.uint8))
        return tf.constant(row)

    def _build_exchange(
        self, holdings: Sequence[Holding]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Builds the operations of an exchange of copies; traced into a tf.function.

        Returns:
          this rank's pieces, the tensors that it lends, the messages that it receives, and the addresses of memory lent
          to it.
        """
        ops, rank = whale_ops.load_ops(), self.rank
        own = [holding for holding in holdings if holding.find_piece(rank) is not None]
        values = _read_values([holding.dtype for holding in own], [holding.handle(rank) for holding in own])
        lent: list[tf.Tensor] = []
        if not self._keepers:
            return values, lent, [], []
        comm = ops.whale_communicator(communicator=self.ranks.comm_name, rank=rank)
        left = iter(values)
        mine = [next(left) if holding.find_piece(rank) is not None else None for holding in holdings]
        messages = self._list_messages(holdings, rank)
        for message in messages:
            if not message.lent:
                ops.whale_send(comm=comm, input=message.pack(mine), key=message.key, peer=self._keepers[rank])
        if lends := [message.pack(mine) for message in messages if message.lent]:
            lent, places = ops.whale_lend(inputs=lends)
            ops.whale_send(comm=comm, input=places, key=f"whale/lent/{rank}", peer=self._keepers[rank])
        kept = self._list_kept(holdings)
        rows = [
            ops.whale_recv(comm=comm, key=one.key, peer=one.rank, shape=[one.elements], T=one.dtype)
            for one in kept
            if not one.lent
        ]
        lenders = Counter(one.rank for one in kept if one.lent)
        return (
            values,
            lent,
            rows,
            [
                ops.whale_recv(comm=comm, key=f"whale/lent/{other}", peer=other, shape=[count], T=tf.int64)
                for other, count in lenders.items()
            ],
        )

    def _list_kept(self, holdings: Sequence[Holding]) -> list[_PieceMessage]:
        """Returns the messages with pieces of other ranks of which this rank keeps copies."""
        of = [rank for rank, keeper in enumerate(self._keepers) if keeper == self.rank]
        return [message for rank in of for message in self._list_messages(holdings, rank)]

    def _list_messages(self, holdings: Sequence[Holding], rank: int) -> list[_PieceMessage]:
        """Returns the messages that together have all pieces which only ``rank`` has.

        Args:
          rank: this rank, which sends them, or a rank for which this one keeps copies.
        """
        other = self._keepers[rank] if rank == self.rank else rank
        lends = self._comm.is_sharing_tensors(other)
        alone_bytes = LENT_BYTES if lends else ALONE_BYTES
        small: dict[tf.DType, list[tuple[int, int, tuple[int, ...]]]] = {}
        found = []
        for i, holding in enumerate(holdings):
            if (piece := holding.find_lone_piece(rank)) is None:
                continue
            one = i, piece, holding.shape(piece)
            if math.prod(one[2]) * holding.dtype.size >= alone_bytes:
                found.append(_PieceMessage(rank, f"whale/copies/{rank}/{i}", holding.dtype, [one], lends))
            else:
                small.setdefault(holding.dtype, []).append(one)
        for dtype, few in small.items():
            row = _PieceMessage(rank, f"whale/copies/{rank}/{dtype.name}", dtype, few)
            found.append(replace(row, lent=lends and row.elements * dtype.size >= LENT_BYTES))
        return found


def _return_row(row: tf.Tensor) -> tf.Tensor:
    return row


def _cut_piece(row: Callable[[], tf.Tensor], begin: int, end: int, shape: tuple[int, ...]) -> tf.Tensor:
    return tf.reshape(row()[begin:end], shape)


def _read_values(dtypes: Sequence[tf.DType], handles: Sequence[Any]) -> list[tf.Tensor]:
    """Reads the values of variables by their handles."""
    if not handles or any("GPU" in handle.device for handle in handles):
        pairs = zip(handles, dtypes)
        return [gen_resource_variable_ops.read_variable_op(handle, dtype) for handle, dtype in pairs]
    return list(whale_ops.load_ops().whale_values(variables=list(handles), T=list(dtypes)))


def _is_equal(before: tf.Tensor | None, after: tf.Tensor | None) -> bool:
    return before is None or after is None or np.array_equal(before.numpy(), after.numpy())


def _find_keeper(rank: int, hosts: Sequence[str]) -> int:
    """Returns the rank that keeps copies for ``rank``: the next one on another host, or else the next one."""
    others = [(rank + i) % len(hosts) for i in range(1, len(hosts))]
    return next((other for other in others if hosts[other] != hosts[rank]), others[0])
