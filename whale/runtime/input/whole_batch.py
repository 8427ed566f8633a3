"""The whole batch of which every rank read a part, for steps whose plan divides it otherwise."""

from __future__ import annotations

import tensorflow as tf

import whale_ops
from whale.capture.sharded import ShardedTensor
from whale.runtime.ranks.faults import raise_comm_error
from whale.runtime.run.context import Context


def whole_batch(part: ShardedTensor, name: str, context: Context) -> tf.Tensor:
    """All rows, [sum(part.sizes), ...], on every rank. Collective.

    Args:
      name: of the argument; equal on all ranks.

    Raises:
      CommError: a rank does not take part.
    """
    ops = whale_ops.ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    try:
        return ops.whale_all_gather(
            comm=comm,
            input=part.local,
            key=f"whale/batch/{name}",
            axis=0,
            sizes=part.sizes,
            ranks=list(range(context.size)),
        )
    except tf.errors.OpError as error:
        raise_comm_error(error, context)
        raise
