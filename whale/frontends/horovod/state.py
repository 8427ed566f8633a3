"""Broadcasts and gathers objects and variables, so that all ranks begin with the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import ProgramError
from whale.frontends.horovod.meeting import check_root, require_context
from whale.frontends.horovod.moves import broadcast_group


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Returns the root's object on every rank; the other ranks' objects are ignored.

    Raises:
      ProgramError: it holds more than numbers, text, containers and NumPy's arrays: nothing from another rank is
        unpickled.
    """
    context = require_context("hvd.broadcast_object()", process_set)
    check_root(context, root_rank)
    _count_exchange(context)
    if context.size == 1:
        return obj
    mine = _pack(obj) if context.rank == root_rank else None
    key = f"hvd/object/{name or ''}"
    return unpack(context.comms[0].broadcast_bytes(key, mine, root_rank, TURN_TIMEOUT_S))


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Callable[[Any], Any]:
    """Returns a function that broadcasts its argument."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Returns all ranks' objects, in order of ranks.

    Raises:
      ProgramError: as ``broadcast_object``.
    """
    context = require_context("hvd.allgather_object()", process_set)
    _count_exchange(context)
    if context.size == 1:
        return [obj]
    said = context.comms[0].allgather_bytes(f"hvd/objects/{name or ''}", _pack(obj), TURN_TIMEOUT_S)
    return [unpack(data) for data in said]


def _pack(obj: Any) -> bytes:
    try:
        return pack(obj)
    except (TypeError, ValueError) as error:
        raise ProgramError(
            "an object sent to other ranks contains more than plain data",
            given=str(error),
            expected="None, numbers, text, bytes, lists, tuples, dicts, sets, NumPy's scalars and arrays",
            action="send what the object is made of (its state or configuration), and make it anew on each rank",
        ) from error


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> Any:
    """Assigns the root's values to variables on every rank; one message for each type.

    Args:
      variables: of TensorFlow or Keras, the same ones in the same order on every rank.
      inplace: accepted for compatibility with Horovod.

    Returns:
      In a graph of TensorFlow 1 the operation that does it; else None.
    """
    require_context("hvd.broadcast_variables()", process_set)
    own = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
    own = [v for v in own if hasattr(v, "assign")]
    if not own:
        return None if _is_run_at_once() else tf.group()
    text = next((v for v in own if v.dtype.base_dtype == tf.string), None)
    if text is not None:
        raise ProgramError(
            "strings are not broadcast as variables",
            given=f"the variable {text.name}",
            expected="variables of numbers",
            action="use hvd.broadcast_object for its value",
        )
    assigned = [v.assign(value) for v, value in zip(own, broadcast_group(own, root_rank))]
    return None if _is_run_at_once() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation of a TensorFlow 1 graph that assigns the root's values to all its variables.

    Raises:
      ProgramError: there is no such graph.
    """
    if tf.executing_eagerly():
        raise ProgramError(
            "TensorFlow 2 has no list of all variables",
            given="hvd.broadcast_global_variables() while TensorFlow executes eagerly",
            expected="hvd.broadcast_variables(model.variables, root_rank)",
            action="name the variables",
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that broadcasts the root's values of all variables as soon as a session is created."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the operation."""
        session.run(self.bcast_op)


def _is_run_at_once() -> bool:
    """Tells whether exchanges run immediately (eagerly, or in a tf.function), so that there is no operation to run."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _count_exchange(context: Any) -> None:
    context.planning.own_programs.exchanges += 1
