"""Finds replicated variables whose copies differ because only some ranks have changed them.

``refuse_lone_writes`` compares variables that were assigned since the last step; ``wrap_with_replica_check`` compares
all variables of a step every few calls (``debug.check_replicas``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

import whale_ops
from whale.distributed.faults import raise_comm_error
from whale.runtime.context import Context
from whale.runtime.variables.compared import refuse_differences

_MOST = 5


def refuse_lone_writes(context: Context, step: str) -> None:
    """Compares between ranks the replicated variables that were assigned since the last step; called before each step,
    and does nothing on a rank that has assigned none.

    If only some ranks have assigned variables, the others exchange the check of their step meanwhile. The two messages
    do not match, and the error says so.

    Args:
      step: name of the step that is about to run.

    Raises:
      CommError: other ranks assigned nothing, or another value.
    """
    assert context.outside is not None
    found = context.variables.list_written(context.outside)
    context.outside.forget_written()
    if not found:
        return
    names = ", ".join(list(found.values())[:_MOST]) + f" and {len(found) - _MOST} more" * (len(found) > _MOST)
    what = f"`{step}`, after this rank assigned to {names} outside of steps"
    ops = whale_ops.load_ops()
    try:
        comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
        ops.whale_check(comm=comm, key="whale/check", fingerprint="assigned", what=what, ranks=[])
    except tf.errors.OpError as error:
        raise_comm_error(error, context)
        raise
    refuse_differences(context.variables.describe_held(context, None, found), context, f"the step `{step}`")


def wrap_with_replica_check(
    call: Callable[[list[Any]], Any], context: Context, step: str, handles: Collection[int]
) -> Callable[[list[Any]], Any]:
    """Wraps ``call`` so that the copies of a step's variables are compared before every n-th call, n being
    ``debug.check_replicas``; returns it unchanged if that is 0.

    Args:
      step: name of the step, for messages.
      handles: Python's ``id`` of the handle of each variable of the step's variables.
    """
    every = context.config["debug.check_replicas"]
    if not every or not context.has_other_processes:
        return call
    calls = 0

    def run_checked(tensors: list[Any]) -> Any:
        nonlocal calls
        if not calls % every:
            when = f"call {calls} of the step `{step}` (debug.check_replicas)"
            refuse_differences(context.variables.describe_held(context, None, handles), context, when)
        calls += 1
        return call(tensors)

    return run_checked
