"""Variables that lie split between steps: every rank holds its part, and steps read and update the parts.

The user's tf.Variable stays what the program names. It holds nothing while the parts are valid; read eagerly, it gives
the global value, which is collective. What a script or a checkpoint assigns to it is a whole value, which the next step
cuts into parts again.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

import whale_ops
from whale.errors import CommError
from whale.ir.layout import Split
from whale.runtime.pieces import restores_by_pieces

if TYPE_CHECKING:
    from whale.capture.captured import CapturedVariable
    from whale.runtime.context import Context
    from whale.runtime.initial import Initial

# Methods that need the whole value in the variable itself.
NEED_WHOLE = (
    "assign_add", "assign_sub", "sparse_read", "gather_nd", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div",
    "scatter_max", "scatter_min", "scatter_update", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_max",
    "scatter_nd_min", "scatter_nd_update", "batch_scatter_update",
)  # fmt: skip


class Parts:
    """The parts that this process's ranks hold of one variable.

    Attributes:
      handles: of the parts, in the order of the process's ranks.
    """

    def __init__(self, captured: CapturedVariable, placement: Split, context: Context, initial: Initial | None = None):
        """
        Args:
          initial: the value of a variable that holds none: its parts are all that is made.
        """
        self.name, self.placement = captured.name, placement
        self._variable, self._handle, self._context = captured.variable, captured.handle, context
        self._parts: list[tf.Variable] = []
        if initial is None:
            self.settle()
        else:
            for rank in context.ranks:
                self._parts.append(initial.part(placement, rank % len(placement.sizes), f"part{rank}"))
            hold_nothing(self._handle, initial.dtype)
        self._variable._whale_parts = self
        kind: type = type(self._variable)
        self._variable.__class__ = _split_class(kind)

    @property
    def handles(self) -> list[Any]:
        return [part.handle for part in self._parts]

    @property
    def bytes(self) -> int:
        """What these ranks hold: their parts, and the whole value where somebody assigned one."""
        held = self._held()
        whole = 0 if held is None else int(tf.size(held)) * held.dtype.size
        return whole + sum(int(part.shape.num_elements()) * part.dtype.size for part in self._parts)

    def settle(self) -> None:
        """Cuts the whole value into parts, if the variable itself has one."""
        whole = self._held()
        if whole is None:
            return
        for i, rank in enumerate(self._context.ranks):
            self._set(i, _cut(whole, self.placement, rank % len(self.placement.sizes)))
        hold_nothing(self._handle, whole.dtype)

    def _set(self, i: int, part: tf.Tensor) -> None:
        if i < len(self._parts):
            self._parts[i].assign(part)
        else:
            # Not tf.Variable, which asks who defers creations.
            name = f"part{self._context.ranks[i]}"
            self._parts.append(resource_variable_ops.ResourceVariable(part, trainable=False, name=name))

    def whole(self) -> tf.Tensor:
        """The global value. Collective between processes, unless a whole value was assigned.

        Raises:
          CommError: the ranks do not all read it, or the run is over.
        """
        held = self._held()
        if held is not None:
            return held
        parts = [part.read_value() for part in self._parts]
        if self._context.between_processes:
            return _gathered(parts[0], self.name, self.placement, self._context)
        return _joined(parts[: len(self.placement.sizes)], self.placement)

    def bring_home(self) -> None:
        """The whole value into the variable itself, until the next step. Collective between processes."""
        self.hold(self.whole())

    def hold(self, whole: tf.Tensor) -> None:
        """A whole value into the variable itself, until the next step."""
        gen_resource_variable_ops.assign_variable_op(self._handle, whole)

    def make_room(self) -> None:
        """Any whole value, so that another can be assigned."""
        if self._held() is None:
            zeros = tf.zeros(self._variable.shape, self._variable.dtype)
            gen_resource_variable_ops.assign_variable_op(self._handle, zeros)

    def _held(self) -> tf.Tensor | None:
        value = gen_resource_variable_ops.read_variable_op(self._handle, self._variable.dtype)
        return value if value.shape == self._variable.shape else None


def hold_nothing(handle: Any, dtype: tf.DType | str) -> None:
    """Frees the memory of a variable whose value lies elsewhere. It stays initialised.

    TensorFlow's eager operations read a variable that they are given past its methods. They must not find a number that
    passes for its value: NaN, of a rank that no variable has, gives NaN or an error.
    """
    nan = tf.as_dtype(dtype).is_floating
    nothing = tf.constant(float("nan"), dtype, (1,) * 9) if nan else tf.zeros((0,), dtype)
    gen_resource_variable_ops.assign_variable_op(handle, nothing)


def _cut(whole: tf.Tensor, placement: Split, rank: int) -> tf.Tensor:
    if placement.blocks > 1:
        return tf.gather(whole, placement.indices(rank), axis=placement.dim)
    begin, size = [0] * whole.shape.rank, [-1] * whole.shape.rank
    begin[placement.dim], size[placement.dim] = placement.offset(rank), placement.sizes[rank]
    return tf.slice(whole, begin, size)


def _joined(parts: list[tf.Tensor], placement: Split) -> tf.Tensor:
    joined = tf.concat(parts, axis=placement.dim)
    return _in_order(joined, placement)


def _in_order(joined: tf.Tensor, placement: Split) -> tf.Tensor:
    if placement.blocks == 1:
        return joined
    order = np.concatenate([placement.indices(i) for i in range(len(placement.sizes))])
    return tf.gather(joined, np.argsort(order), axis=placement.dim)


def _gathered(part: tf.Tensor, name: str, placement: Split, context: Context) -> tf.Tensor:
    from whale.runtime.context import is_current

    if not is_current(context):
        raise CommError(
            "a variable that lies split over the ranks cannot be read any more",
            variable=name,
            given="a reading after wh.shutdown()",
            expected="a reading by all ranks before it",
            action="read or save variables before wh.shutdown()",
        )
    # Told apart by this exchange, which every other rank has to make at the same place of its script.
    purpose = f"the reading of the variable {name!r}, which lies split over the ranks (every rank has to read it)"
    said = context.comms[0].allgather_bytes("whale/read", name.encode(), context.config["check.timeout_s"], purpose)
    other = next((rank for rank, n in enumerate(said) if n != said[0]), None)
    if other is not None:
        raise CommError(
            "the ranks read different variables, which lie split over them",
            given=f"rank 0 reads {said[0].decode()}, rank {other} reads {said[other].decode()}",
            expected="the same variables in the same order on every rank",
            action="read variables on every rank, whatever the rank does with the value",
        )
    ops = whale_ops.ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    sizes = [placement.local(place) for place in range(len(placement.sizes))]
    first = context.rank - context.rank % len(sizes)  # of the ranks that have the parts between them
    group = list(range(first, first + len(sizes)))
    key = f"whale/read/{name}@{first}"
    joined = ops.whale_all_gather(comm=comm, input=part, key=key, axis=placement.dim, sizes=sizes, ranks=group)
    return _in_order(joined, placement)


@cache
def _split_class(kind: type) -> type:
    """``kind`` for a variable that lies split; graphs that read it are built as ever."""

    def read(self: Any, no_copy: bool = False) -> Any:
        if tf.executing_eagerly():
            return self._whale_parts.whole()
        return kind._read_variable_op(self, no_copy)  # type: ignore[attr-defined]

    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            self._whale_parts.make_room()
        return kind.assign(self, *args, **kwargs)  # type: ignore[attr-defined]

    def serialized(self: Any) -> dict[str, Any]:
        return {} if restores_by_pieces() else kind._serialize_to_tensors(self)  # type: ignore[attr-defined]

    def whole_first(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                self._whale_parts.bring_home()
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    methods = {name: whole_first(name) for name in NEED_WHOLE if hasattr(kind, name)}
    methods.update(_read_variable_op=read, assign=assign, _serialize_to_tensors=serialized)
    return type(kind.__name__, (kind,), methods)
