"""Brings the first rank's first values to every rank: what they are made from, or the values themselves. Collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.captured import CapturedVariable
from whale.errors import CommError
from whale.runtime.ranks.msgpack_values import pack, unpack
from whale.runtime.ranks.ranks import Ranks
from whale.runtime.variables.deferred import find_deferred
from whale.runtime.variables.partial_initializers import DeferredInitial, RecordedOp


def agree_on_initials(new: Sequence[CapturedVariable], context: Ranks) -> list[DeferredInitial | None]:
    """Returns the first rank's initial values of variables that hold none there; None for those that it has made.

    Raises:
      CommError: a variable is restored from a checkpoint on the first rank only.
    """
    mine = [find_deferred(c.variable) for c in new]
    if not context.has_other_processes or not new:
        return mine
    comm, timeout_s = context.comms[0], context.config["check.timeout_s"]
    data = None
    if context.rank == 0:
        data = pack(["reader" if i is not None and i.reader is not None else _encode_initial(i) for i in mine])
    said = unpack(comm.broadcast_bytes("whale/first_values/initial", data, 0, timeout_s))
    firsts = [one if one == "reader" else _decode_initial(one) for one in said]
    for i, (c, first, own) in enumerate(zip(new, firsts, mine)):
        if first == "reader":
            firsts[i] = own  # its reader knows the file
            if own is None or own.reader is None:
                raise CommError(
                    "a variable takes its first value from a checkpoint on some ranks only",
                    variable=c.name,
                    given=f"rank 0 restored it, rank {context.rank} did not",
                    expected="the same on every rank",
                    action="restore on every rank",
                )
    return firsts


def _encode_initial(initial: DeferredInitial | None) -> tuple[Any, ...] | None:
    if initial is None:
        return None
    ops = [(op.kind, op.attrs, op.operands, op.first, op.shapes, op.dtypes) for op in initial.ops]
    return initial.shape, initial.dtype, initial.little, ops, initial.result


def _decode_initial(said: Any) -> DeferredInitial | None:
    if said is None:
        return None
    shape, dtype, little, ops, result = said
    return DeferredInitial(shape, dtype, little, tuple(RecordedOp(*op) for op in ops), result)


def broadcast_values(captured: Sequence[CapturedVariable], context: Ranks) -> None:
    """Sends the first rank's values, one fused broadcast per element type, straight into the variables."""
    ops = whale_ops.load_ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    by_dtype: dict[str, list[Any]] = {}
    for c in captured:
        by_dtype.setdefault(c.variable.dtype.name, []).append(c.variable)
    for dtype, variables in by_dtype.items():
        values = ops.whale_broadcast(
            comm=comm,
            inputs=[gen_resource_variable_ops.read_variable_op(v.handle, v.dtype) for v in variables],
            key=f"whale/first_values/{dtype}",
            root=0,
            shapes=[v.shape for v in variables],
            ranks=[],
        )
        for variable, value in zip(variables, values) if context.rank else ():
            gen_resource_variable_ops.assign_variable_op(variable.handle, value)
