"""Tracks which rank holds which piece of the variables that programs use, and makes variables whole again; for elastic
runs, which recover the pieces of lost ranks.

A piece is what one rank computes with: a shard of a sharded variable, or the whole value of another one. The pieces of
all ranks follow from the plans, so every rank knows them without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

from whale.runtime.variables.deferred import defer
from whale.runtime.variables.partial_initializers import DeferredInitial
from whale.runtime.variables.split_variable import VariableParts
from whale.runtime.variables.stage_variables import VariableHome


class Holding:
    """Describes the pieces of one variable, and which ranks hold them.

    Args:
      variable: the tf.Variable.
      handle: its resource handle.
      parts: its shards, if it is sharded; else None.
      home: tells which ranks have its present value, if it belongs to a pipeline stage; else None.
      size: number of ranks.

    Attributes:
      variable: the tf.Variable.
      key: Python's ``id`` of its handle.
      holders: for each piece, the ranks that have it.
      is_everywhere: whether every rank has the whole value.
    """

    def __init__(self, variable: Any, handle: Any, parts: VariableParts | None, home: VariableHome | None, size: int):
        self.variable, self.key = variable, id(handle)
        self._handle, self._parts, self._home = handle, parts, home
        everyone = tuple(range(size))
        if parts is not None:
            self.holders = tuple(parts.find_holders(place) for place in range(parts.tiles.count))
        else:
            self.holders = (everyone if home is None or home.ranks is None else tuple(sorted(home.ranks)),)
        self.is_everywhere = self.holders == (everyone,)

    @property
    def has_parts(self) -> bool:
        """Returns True if the variable is sharded, or belongs to a stage."""
        return self._parts is not None or self._home is not None

    @property
    def dtype(self) -> tf.DType:
        """Returns the dtype of the variable."""
        return self.variable.dtype

    def find_piece(self, rank: int) -> int | None:
        """Returns the index in ``holders`` of the piece that a rank has; None: it has none."""
        return next((piece for piece, ranks in enumerate(self.holders) if rank in ranks), None)

    def find_lone_piece(self, rank: int) -> int | None:
        """Returns the index in ``holders`` of the piece that this rank alone has, and that would be lost with it; None:
        there is none.
        """
        return next((piece for piece, ranks in enumerate(self.holders) if ranks == (rank,)), None)

    def handle(self, rank: int) -> Any:
        """Returns the resource handle by which the piece of ``rank``, a rank of this process, is read."""
        return self._handle if self._parts is None else self._parts.find_rank_part(rank).handle

    def shape(self, piece: int) -> tuple[int, ...]:
        """Returns the shape of the piece with this index in ``holders``."""
        whole = tuple(self.variable.shape)
        return whole if self._parts is None else tuple(self._parts.tiles.find_local_shape(whole, piece))

    def find_assigned(self) -> tf.Tensor | None:
        """Returns the whole value that the script has assigned to a sharded variable since the last step; None: it has
        not.
        """
        if self._parts is None or not self._parts.is_assigned:
            return None
        return gen_resource_variable_ops.read_variable_op(self._handle, self.dtype)

    def assemble(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the whole value, assembled from all pieces in order."""
        if self._parts is None:
            return pieces[0]
        shape = tuple(self.variable.shape)
        whole = np.empty(shape, self.dtype.as_numpy_dtype)
        for place, piece in enumerate(pieces):
            for region in self._parts.tiles.iterate_regions(shape, place):
                to, of = _make_slices(region.begin, region.size), _make_slices(region.start, region.size)
                whole[to] = piece.numpy()[of]
        return tf.constant(whole)

    def make_whole(self, value: tf.Tensor) -> None:
        """Makes the variable an ordinary, replicated one with the value ``value``."""
        self._leave()
        gen_resource_variable_ops.assign_variable_op(self._handle, value)

    def make_new(self) -> None:
        """Restores the variable to its state before any program used it, deferred or with its initial value; for
        variables that no step has changed.
        """
        first = self._first
        self._leave()
        if isinstance(first, DeferredInitial):
            defer(self.variable, first)
        elif first is not None:
            gen_resource_variable_ops.assign_variable_op(self._handle, first)

    @property
    def _first(self) -> DeferredInitial | tf.Tensor | None:
        owner = self._parts or self._home
        return None if owner is None else owner.first

    def forget_first(self) -> None:
        """Drops the initial value that ``make_new`` would restore, because a step has changed the variable."""
        for owner in (self._parts, self._home):
            if owner is not None:
                owner.first = None

    def _leave(self) -> None:
        for owner in (self._parts, self._home):
            if owner is not None:
                owner.leave()


class HoldingsCache:
    """Caches which rank holds which piece of the known variables, because every step of an elastic run needs it and it
    rarely changes.
    """

    def __init__(self) -> None:
        self._lie: list[Any] = []
        self._holdings: list[Holding] = []

    def list_holdings(self, entries: Mapping[int, Any], homes: Mapping[int, VariableHome], size: int) -> list[Holding]:
        """Returns the holdings of all variables; the same list object as before if no layout has changed.

        Args:
          entries: Python's ``id`` of a variable's handle -> the variable, as ``VariableStore`` holds it.
          homes: Python's ``id`` of a variable's handle -> home of a stage's variable.
          size: number of ranks.
        """
        known = [(entry, homes.get(key)) for key, entry in entries.items()]
        lie = [size, *((entry.parts, home, home and home.ranks) for entry, home in known)]
        if self._lie != lie:
            self._holdings = [Holding(entry.variable, entry.handle, entry.parts, home, size) for entry, home in known]
            self._lie = lie
        return self._holdings


def _make_slices(begin: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b, b + s) for b, s in zip(begin, size))
