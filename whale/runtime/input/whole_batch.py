"""Gives a step its rows of a batch of which every rank read a part, or the whole, where a plan divides it otherwise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import whale_ops
from whale.capture.sharded import ShardedTensor
from whale.distributed.faults import raise_comm_error
from whale.errors import ProgramError
from whale.runtime.context import Context


def gather_whole_batch(part: ShardedTensor, name: str, context: Context) -> tf.Tensor:
    """Gathers all rows, [sum(part.sizes), ...], on every rank. Collective.

    Args:
      name: of the argument; equal on all ranks.

    Raises:
      CommError: a rank does not take part.
    """
    ops = whale_ops.load_ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    order = list(context.rank_order or range(context.size))
    try:
        return ops.whale_all_gather(
            comm=comm,
            inputs=[part.local],
            key=f"whale/batch/{name}",
            axis=0,
            sizes=[part.sizes[rank] for rank in order],
            ranks=order,
        )[0]
    except tf.errors.OpError as error:
        raise_comm_error(error, context)
        raise


def rows_of_run(value: Any, context: Context) -> Any:
    """Returns what a lowered step takes of an argument: of a part of a batch, this rank's rows.

    Raises:
      ProgramError: the part belongs to another run.
    """
    if type(value) is not ShardedTensor:
        return value
    if not context.has_other_processes or value.rank != context.rank or len(value.sizes) != context.size:
        here = f"a part for rank {context.rank} of {context.size}" if context.has_other_processes else "whole batches"
        raise ProgramError(
            "a part of a batch belongs to another run",
            given=f"{value!r}, made for rank {value.rank} of {len(value.sizes)}",
            expected=here,
            action="take it from a wh.shard dataset made after this run's wh.init()",
        )
    return value.local
