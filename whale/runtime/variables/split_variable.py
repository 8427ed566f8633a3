"""Keeps variables sharded between steps: every rank holds its part, and steps read and update the parts.

A variable that is whole in the host's memory, beside an accelerator, counts as having one part, which all ranks hold.

The user's tf.Variable remains the program's object. It holds no value while the parts are valid; read eagerly, it
returns the global value, which is collective. A value assigned by a script or a checkpoint is a whole value, which the
next step cuts into parts again.

Decision: 0038.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

import whale_ops
from whale.capture.captured import CapturedVariable
from whale.distributed.collective_call_check import read_surviving, read_together
from whale.distributed.ranks import Ranks
from whale.ir.layout import Shard
from whale.ir.mesh import Tiles, find_coordinates
from whale.runtime.variables.checkpoint_regions import is_restoring_by_regions
from whale.runtime.variables.in_files import copy_part, find_folder, make_mapped_variable, write_block
from whale.runtime.variables.native_reads import forget_noted, make_handle_properties, note_parts
from whale.runtime.variables.partial_initializers import DeferredInitial, copy_to_own_memory

# Methods that need the whole value in the variable itself.
NEED_WHOLE = (
    "assign_add", "assign_sub", "sparse_read", "gather_nd", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div",
    "scatter_max", "scatter_min", "scatter_update", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_max",
    "scatter_nd_min", "scatter_nd_update", "batch_scatter_update", "_strided_slice_assign",
)  # fmt: skip


class VariableParts:
    """Holds the parts of one sharded variable that this process's ranks have.

    Attributes:
      name: of the variable.
      tiles: how the variable is cut, and over which mesh axes.
      folder: folder of files with the parts; "": they are in memory.
      group: the ranks that have the parts, if they are those of a stage; (): all ranks. If there are more ranks than
        parts, each consecutive group of ranks has all parts.
      device: of the parts; None: TensorFlow's choice.
      first: the initial value, as long as it may be needed again.
    """

    def __init__(
        self,
        captured: CapturedVariable,
        tiles: Tiles,
        context: Ranks,
        initial: DeferredInitial | None = None,
        group: tuple[int, ...] = (),
        device: str | None = None,
    ):
        """Cuts the variable's value into parts, or computes the parts from its initial value.

        Args:
          captured: the variable.
          initial: the initial value of a deferred variable, of which only the parts are computed; None: the variable
            has a value.
        """
        self.device = device
        self.name, self.tiles, self.group = captured.name, tiles, group
        self.folder = find_folder(captured.variable)
        self._variable, self._handle, self._context = captured.variable, captured.handle, context
        self._parts: dict[int, tf.Variable] = {}  # by rank
        self.first: DeferredInitial | tf.Tensor | None = initial
        if initial is None:
            self.first = self.settle()
        else:
            with tf.device(device):
                for rank, place in self._list_own_parts():
                    self._parts[rank] = initial.make_part(tiles, place, f"part{rank}", self.folder)
            hold_nothing(self._handle, initial.dtype)
        self._variable._whale_parts = self
        kind: type = type(self._variable)
        self._kind = kind
        self._variable.__class__ = _make_split_class(kind)
        note_parts(self._handle, self)

    def leave(self) -> None:
        """Makes the variable an ordinary one without a value again; the parts are freed with their last reader."""
        self._variable.__class__ = self._kind
        del self._variable._whale_parts
        forget_noted(self._handle)
        self._parts.clear()

    @property
    def key(self) -> int:
        """Returns ``id`` of the variable's handle."""
        return id(self._handle)

    @property
    def dtype(self) -> tf.DType:
        """Returns the dtype of the variable."""
        return self._variable.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """Returns the shape of the whole variable."""
        return self._variable.shape

    def find_place(self, rank: int) -> int | None:
        """Returns the number of the part that a rank has; None: it has none."""
        if not self.group:
            return rank % self.tiles.count
        return self.group.index(rank) % self.tiles.count if rank in self.group else None

    def find_holders(self, place: int) -> tuple[int, ...]:
        """Returns the ranks that have part number ``place``."""
        return (self.group or tuple(range(self._context.size)))[place :: self.tiles.count]

    def find_rank_part(self, rank: int) -> tf.Variable:
        """Returns the variable with the part of ``rank``, which is a rank of this process."""
        return self._parts[rank]

    def _list_own_parts(self) -> list[tuple[int, int]]:
        """Returns (rank, number of its part) for each rank of this process that has one."""
        places = ((rank, self.find_place(rank)) for rank in self._context.ranks)
        return [(rank, place) for rank, place in places if place is not None]

    @property
    def bytes(self) -> int:
        """Returns the bytes of memory in this process: the parts, unless they are in files, and the whole value if one
        was assigned.
        """
        held = self._read_held()
        whole = 0 if held is None else int(tf.size(held)) * held.dtype.size
        return (
            whole
            if self.folder
            else whole + sum(int(part.shape.num_elements()) * part.dtype.size for part in self._parts.values())
        )

    def settle(self) -> tf.Tensor | None:
        """Cuts a whole value that the script has assigned to the variable into parts, and returns the whole value; None
        if the script has assigned none since the last step.
        """
        whole = self._read_held()
        if whole is None:
            return None
        for rank, place in self._list_own_parts():
            self._set(rank, cut_part(whole, self.tiles, place))
        hold_nothing(self._handle, whole.dtype)
        return whole

    def read_value(self, rank: int) -> tf.Tensor:
        """Returns a snapshot of the part of ``rank``, which is a rank of this process."""
        part = self._parts[rank]
        return copy_part(part, self.folder) if self.folder else part.read_value()

    def read_own(self) -> list[tf.Tensor]:
        """Returns the parts of this process's ranks; cut from the whole value if one was assigned."""
        held = self._read_held()
        places = self._list_own_parts()
        return [self.read_value(r) if held is None else cut_part(held, self.tiles, place) for r, place in places]

    def free_files(self) -> None:
        """Frees the files of the parts now, because ending a process that maps large files takes long."""
        for part in self._parts.values() if self.folder else ():
            hold_nothing(part.handle, self.dtype)

    def _set(self, rank: int, part: tf.Tensor) -> None:
        if self.folder:
            if rank not in self._parts:
                self._parts[rank] = make_mapped_variable(self.folder, part.shape.as_list(), part.dtype, f"part{rank}")
            write_block(self._parts[rank], [0] * part.shape.rank, part)
        elif rank in self._parts:
            self._parts[rank].assign(part)
        else:
            # tf.Variable is not used, because its creators would defer the part.
            name = f"part{rank}"
            with tf.device(self.device):
                self._parts[rank] = resource_variable_ops.ResourceVariable(part, trainable=False, name=name)

    def gather_whole(self) -> tf.Tensor:
        """Returns the global value. Collective between processes, unless a whole value was assigned or this rank has it
        all.

        Raises:
          CommError: not all ranks read it, or the run is over.
        """
        held = self._read_held()
        if held is not None:
            return held
        if self._context.has_other_processes:
            part = self._parts.get(self._context.rank)
            if self.tiles.count == 1 and not self.group and part is not None:
                return part.read_value()  # every rank has all of it
            return _gather_parts(None if part is None else part.read_value(), self, self._context)
        parts = [self._parts[self.find_holders(i)[0]].read_value() for i in range(self.tiles.count)]
        for cut in reversed(self.tiles.cuts):  # the last axis runs fastest
            size = len(cut.sizes)
            parts = [_join_parts(parts[i : i + size], cut) for i in range(0, len(parts), size)]
        return parts[0]

    def read(self) -> tf.Tensor:
        """Returns the global value, when a script reads the variable; collective between processes."""
        return read_surviving(self._context, self._variable, self.gather_whole)

    def bring_home(self) -> None:
        """Gathers the whole value into the variable's own memory, where it stays until the next step. Collective
        between processes.
        """
        self.hold(self.gather_whole())

    def hold(self, whole: tf.Tensor) -> None:
        """Assigns a whole value to the variable's own memory, where it stays until the next step cuts it into parts."""
        gen_resource_variable_ops.assign_variable_op(self._handle, whole)

    def make_room(self) -> None:
        """Assigns zeros of the variable's shape to its own memory if that has no value, so that TensorFlow accepts an
        assignment.
        """
        if self._read_held() is None:
            zeros = tf.zeros(self._variable.shape, self._variable.dtype)
            gen_resource_variable_ops.assign_variable_op(self._handle, zeros)

    @property
    def is_assigned(self) -> bool:
        """Returns True if a whole value was assigned, which the next step will cut into parts."""
        return self._read_held() is not None

    def _read_held(self) -> tf.Tensor | None:
        value = gen_resource_variable_ops.read_variable_op(self._handle, self._variable.dtype)
        return value if value.shape == self._variable.shape else None


def forget_parts(split: list[VariableParts]) -> None:
    """Frees the files of all variables in the list at the end of the run, and empties the list."""
    while split:
        split.pop().free_files()


def hold_nothing(handle: Any, dtype: tf.DType | str) -> None:
    """Frees the memory behind a variable's handle, because its value is elsewhere; the variable stays initialised.

    TensorFlow's eager operations read a variable operand without calling its methods. They must not find a number that
    looks like its value: a tensor of NaN, of a rank that no variable has, leads to NaN or an error.
    """
    nan = tf.as_dtype(dtype).is_floating
    nothing = tf.constant(float("nan"), dtype, (1,) * 9) if nan else tf.zeros((0,), dtype)
    gen_resource_variable_ops.assign_variable_op(handle, nothing)


def cut_part(whole: tf.Tensor, tiles: Tiles, place: int) -> tf.Tensor:
    """Returns one shard of a whole value, in memory of its own.

    Args:
      place: number of the shard in ``tiles``.
    """
    regions = list(tiles.iterate_regions(tuple(whole.shape.as_list()), place))
    if len(regions) == 1:
        # tf.slice is not used: if the handle has no shape, TensorFlow's optimizer replaces a slice of the first rows by
        # the whole tensor.
        begin, size = regions[0].begin, regions[0].size
        return copy_to_own_memory(tf.strided_slice(whole, begin, np.add(begin, size)))
    at = find_coordinates(place, tiles.sizes)
    for one, coordinate in zip(tiles.list_cuts(at), at):
        whole = tf.gather(whole, one.list_indices(coordinate), axis=one.dim)
    return whole


def _join_parts(parts: list[tf.Tensor], placement: Shard) -> tf.Tensor:
    joined = tf.concat(parts, axis=placement.dim)
    return _restore_order(joined, placement)


def _restore_order(joined: tf.Tensor, placement: Shard) -> tf.Tensor:
    if placement.blocks == 1:
        return joined
    order = np.concatenate([placement.list_indices(i) for i in range(len(placement.sizes))])
    return tf.gather(joined, np.argsort(order), axis=placement.dim)


def gather_on_rank(
    part: tf.Tensor, tiles: Tiles, order: Sequence[int], rank: int, comm: tf.Tensor, key: str
) -> tf.Tensor:
    """All-gathers the whole value among a group of ranks that together have all parts; called by each rank of the
    group. Collective.

    Args:
      part: the part of ``rank``.
      order: ranks in order of their parts; those of a group are consecutive.
      rank: this rank.
      comm: the communicator's resource.
      key: prefix of the keys by which ranks match these messages.
    """
    position = order.index(rank)
    at = position % tiles.count
    group = order[position - at : position - at + tiles.count]
    step = 1
    cuts = tiles.list_cuts(find_coordinates(at, tiles.sizes))
    for i, cut in reversed(list(enumerate(cuts))):  # the last axis runs fastest
        size = len(cut.sizes)
        begin = at - at // step % size * step
        (part,) = whale_ops.load_ops().whale_all_gather(
            comm=comm,
            inputs=[part],
            key=f"{key}/{group[begin]}/{i}",
            axis=cut.dim,
            sizes=[cut.local_size(c) for c in range(size)],
            ranks=group[begin : begin + size * step : step],
        )
        part, step = _restore_order(part, cut), step * size
    return part


def _gather_parts(part: tf.Tensor | None, parts: VariableParts, context: Ranks) -> tf.Tensor:
    name = parts.name
    read_together(
        context,
        name,
        "a variable that is sharded over the ranks",
        one="which is sharded over the ranks",
        many="which are sharded over them",
    )
    ops = whale_ops.load_ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    tiles = parts.tiles
    first = context.rank - context.rank % tiles.count  # first of the consecutive ranks that together have all parts
    group = list(parts.group[: tiles.count] or range(first, first + tiles.count))
    key = f"whale/read/{name}@{group[0]}"
    joined = tf.zeros((0,), parts.dtype)
    if part is not None and context.rank in group:
        joined = gather_on_rank(part, tiles, group, context.rank, comm, key)
    if parts.group:  # the other ranks have nothing of it
        (joined,) = ops.whale_broadcast(
            comm=comm, inputs=[joined], key=f"{key}/sent", root=group[0], shapes=[parts.shape], ranks=[]
        )
    return joined


@cache
def _make_split_class(kind: type) -> type:
    """Returns a subclass of ``kind`` for sharded variables, whose methods gather and cut the value when called eagerly;
    graphs are built as usual.
    """

    def read(self: Any, no_copy: bool = False) -> Any:
        if tf.executing_eagerly():
            if not record.could_possibly_record():
                return self._whale_parts.read()
            hold_read(self)  # a gradient tape has to see that the variable's own handle is read
        return kind._read_variable_op(self, no_copy)  # type: ignore[attr-defined]

    def hold_read(self: Any) -> None:
        self._whale_parts.hold(self._whale_parts.read())

    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            self._whale_parts.make_room()
        return kind.assign(self, *args, **kwargs)  # type: ignore[attr-defined]

    def serialize(self: Any) -> dict[str, Any]:
        return {} if is_restoring_by_regions() else kind._serialize_to_tensors(self)  # type: ignore[attr-defined]

    def wrap_with_whole(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                self._whale_parts.bring_home()
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    methods = {name: wrap_with_whole(name) for name in NEED_WHOLE if hasattr(kind, name)}
    methods.update(_read_variable_op=read, assign=assign, _serialize_to_tensors=serialize)
    methods.update(make_handle_properties(hold_read))
    return type(kind.__name__, (kind,), methods)
