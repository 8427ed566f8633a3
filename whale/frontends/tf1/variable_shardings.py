"""Tracks which ranks have the values of a session's variables, and builds the operations that move them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.distributed.ranks import Ranks
from whale.ir.mesh import Tiles
from whale.ir.values import TensorType
from whale.partition.variable_use import VariableUse
from whale.runtime.variables.split_variable import cut_part, gather_on_rank


@dataclass(frozen=True, slots=True)
class VariableSharding:
    """The ranks that have a variable's present value: a replica on each, or its tiles on those in ``order``."""

    ranks: frozenset[int]
    tiles: Tiles | None = None
    order: tuple[int, ...] = ()

    def find_place(self, rank: int) -> int | None:
        """Returns the tile that a rank has; None: it has none, or the variable is not split."""
        if self.tiles is None or rank not in self.ranks:
            return None
        return self.order.index(rank) % self.tiles.count

    def can_serve(self, wanted: VariableSharding) -> bool:
        """Tells whether the present sharding includes the wanted one."""
        if wanted.tiles is None:
            return self.tiles is None and wanted.ranks <= self.ranks
        return (self.tiles, self.order) == (wanted.tiles, wanted.order)


def find_sharding(use: VariableUse, size: int) -> VariableSharding:
    """Returns the sharding of a variable in a run of ``size`` ranks."""
    if use.tiles is None:
        return VariableSharding(use.ranks)
    order = use.place or tuple(range(size))
    return VariableSharding(frozenset(order), use.tiles, order)


class ShardingMoves:
    """Builds operations that gather split variables, split whole values, and free unused values.

    Args:
      handle: in ``graph``, of (a variable's name, the position of one of this process's ranks, dtype).
    """

    def __init__(self, context: Ranks, graph: tf.Graph, handle: Callable[[str, int, tf.DType], tf.Tensor]) -> None:
        self._context, self._graph, self._handle = context, graph, handle
        self._made: dict[str, dict[Hashable, list[tf.Operation]]] = {}
        self._number = 0  # counts exchanges, equal on all ranks

    def forget(self, name: str) -> None:
        """Forgets a variable's operations, because it has moved to other memory."""
        self._made.pop(name, None)

    def gather_everywhere(self, name: str, held: TensorType, now: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations that gather the whole value on every rank. Collective."""

        def make_operations() -> list[tf.Operation]:
            number, self._number = self._number, self._number + 1
            return [
                op
                for position, rank in enumerate(self._context.ranks)
                for op in self._gather_on_rank(f"present/{number}", position, rank, name, held, now)
            ]

        return self._make_once(name, ("together", now), make_operations)

    def cut_to_tiles(self, name: str, held: TensorType, lying: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations by which every rank keeps only its tile of a whole value."""
        tiles, dtype = lying.tiles or Tiles(), tf.as_dtype(held.dtype)

        def keep_tile(position: int, place: int) -> tf.Operation:
            handle = self._handle(name, position, dtype)
            whole = tf.ensure_shape(gen_resource_variable_ops.read_variable_op(handle, dtype), held.shape)
            return gen_resource_variable_ops.assign_variable_op(handle, cut_part(whole, tiles, place))

        places = [(position, lying.find_place(rank)) for position, rank in enumerate(self._context.ranks)]
        return self._make_once(
            name, ("cut", lying), lambda: [keep_tile(i, place) for i, place in places if place is not None]
        )

    def free(self, name: str, held: TensorType, ranks: frozenset[int]) -> Sequence[tf.Operation]:
        """Returns operations that free the value on these ranks; the variable stays initialised there."""
        dtype = tf.as_dtype(held.dtype)

        def free_value(position: int) -> tf.Operation:
            handle = self._handle(name, position, dtype)
            return gen_resource_variable_ops.assign_variable_op(handle, tf.zeros((0,), dtype))

        at = [position for position, rank in enumerate(self._context.ranks) if rank in ranks]
        return self._make_once(name, ("free", ranks), lambda: list(map(free_value, at)))

    def _make_once(self, name: str, key: Hashable, make: Callable[[], list[tf.Operation]]) -> Sequence[tf.Operation]:
        known = self._made.setdefault(name, {})
        if key not in known:
            with self._graph.as_default():
                known[key] = make()
        return known[key]

    def _gather_on_rank(
        self, key: str, position: int, rank: int, name: str, held: TensorType, now: VariableSharding
    ) -> list[tf.Operation]:
        """Builds one rank's operations of ``gather_everywhere``."""
        ops, dtype = whale_ops.load_ops(), tf.as_dtype(held.dtype)
        comm = ops.whale_communicator(communicator=self._context.comm_name, rank=rank)
        handle = self._handle(name, position, dtype)
        value = tf.zeros((0,), dtype)
        if rank in now.ranks:
            value = gen_resource_variable_ops.read_variable_op(handle, dtype)
            if now.tiles is not None:
                value = gather_on_rank(value, now.tiles, now.order, rank, comm, key)
        if len(now.ranks) < self._context.size:
            root = now.order[0] if now.order else min(now.ranks)
            (value,) = ops.whale_broadcast(
                comm=comm, inputs=[value], key=f"{key}/sent", root=root, shapes=[held.shape], ranks=[]
            )
            if now.tiles is None and rank in now.ranks:
                return [value.op]
        return [gen_resource_variable_ops.assign_variable_op(handle, value)]
