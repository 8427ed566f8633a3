"""Finds replicated variables that only one rank has changed: by an assignment since the last step, or periodically, in
any way.
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
    """Compares assignments since the last step to replicated variables between ranks.

    It is called only if there were any. A rank without assignments does not call it, so this rank's message meets that
    rank's step check, which reveals the difference.

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
    """Wraps ``call`` so that copies of a step's variables are compared before every ``debug.check_replicas``-th call.

    Args:
      step: its name.
      handles: numbers (``id``) of the handles of its variables.
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
