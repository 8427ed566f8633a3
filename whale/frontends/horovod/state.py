"""Broadcasts and gathers Python objects and variables, so that all ranks start from the same state."""

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
    """Returns the root rank's object on every rank; ``obj`` of other ranks is ignored.

    Args:
      obj: numbers, text, bytes, containers of these, and NumPy arrays.
      session: ignored.
      name: matches this call with the other ranks' calls; None: the order of calls does.
      process_set: only the set of all ranks is supported.

    Raises:
      ProgramError: the object holds other values. Pickle is not used, since unpickling runs code from another process.
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
    """Returns a function ``f(obj)`` that calls ``broadcast_object`` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Returns a list of all ranks' objects, in order of ranks; for the arguments see ``broadcast_object``.

    Raises:
      ProgramError: an object holds something else than ``broadcast_object`` can send.
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
            expected="None, numbers, text, bytes, NumPy scalars and arrays; and lists, tuples, dicts and sets of these",
            action="send the object's state or configuration as plain data, and create the object from it on each rank",
        ) from error


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> Any:
    """Assigns the root rank's values to variables on every rank, with one message per dtype.

    Args:
      variables: tf.Variables or Keras variables, in the same order on every rank.
      root_rank: the rank whose values are sent.
      process_set: only the set of all ranks is supported.
      inplace: ignored, only accepted because Horovod has it.

    Returns:
      In a graph of TensorFlow 1, the operation to run; otherwise None.

    Raises:
      ProgramError: a variable holds strings.
    """
    require_context("hvd.broadcast_variables()", process_set)
    own = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
    own = [v for v in own if hasattr(v, "assign")]
    if not own:
        return None if _is_run_at_once() else tf.group()
    text = next((v for v in own if v.dtype.base_dtype == tf.string), None)
    if text is not None:
        raise ProgramError(
            "hvd.broadcast_variables cannot send variables of strings",
            given=f"the variable {text.name} of dtype string",
            expected="variables of numbers or bools",
            action="broadcast its value with hvd.broadcast_object, and assign it on each rank",
        )
    assigned = [v.assign(value) for v, value in zip(own, broadcast_group(own, root_rank))]
    return None if _is_run_at_once() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns an operation that assigns the root rank's values to all global variables of a TensorFlow 1 graph.

    Raises:
      ProgramError: eager execution is on, so there is no list of all variables.
    """
    if tf.executing_eagerly():
        raise ProgramError(
            "hvd.broadcast_global_variables() needs a TensorFlow 1 graph: with eager execution there is no list of all "
            "variables",
            given="hvd.broadcast_global_variables() with eager execution on",
            expected="hvd.broadcast_variables(model.variables, root_rank)",
            action="call hvd.broadcast_variables with the variables of the model and of the optimizer",
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables from the root rank when a session is created."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast."""
        session.run(self.bcast_op)


def _is_run_at_once() -> bool:
    """Returns True unless a TensorFlow 1 graph is built; eagerly and in a tf.function exchanges run without a
    session.
    """
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _count_exchange(context: Any) -> None:
    context.planning.own_programs.exchanges += 1
