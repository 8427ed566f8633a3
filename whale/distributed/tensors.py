"""Implements the collectives that a script calls itself, eagerly or inside a graph.

Every rank has to make the same exchanges: the n-th exchange under a key on one rank is matched with the n-th under that
key on the others. With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

import whale_ops
from whale.distributed.faults import raise_comm_error
from whale.distributed.ranks import Ranks


def all_reduce(ranks: Ranks, tensors: Sequence[Any], key: str, reduction: str = "sum") -> list[Any]:
    """Reduces tensors element-wise over the ranks, in one message.

    Args:
      ranks: the ranks of the run.
      tensors: tensors of one dtype, with the same shapes on every rank.
      key: name of the exchange, equal on all ranks.
      reduction: "sum", "min", "max" or "prod".
    """
    if ranks.size == 1:
        return [tf.identity(t) for t in tensors]
    with _open_exchange(ranks) as (ops, comm):
        return list(ops.whale_all_reduce(comm, list(tensors), key=key, reduction=reduction))


def all_gather(ranks: Ranks, tensor: Any, key: str) -> Any:
    """Concatenates the ranks' tensors along dimension 0, where their sizes may differ, in order of ranks."""
    if ranks.size == 1:
        return tf.identity(tensor)
    with _open_exchange(ranks) as (ops, comm):
        return ops.whale_all_gather(comm, [tensor], key=key)[0]


def broadcast(ranks: Ranks, tensors: Sequence[Any], root: int, key: str) -> list[Any]:
    """Returns the root's tensors on every rank, in one message.

    Args:
      ranks: the ranks of the run.
      tensors: tensors of one dtype; on ranks other than the root only their number and dtype count.
      root: the rank whose tensors are sent.
      key: name of the exchange, equal on all ranks.
    """
    if ranks.size == 1:
        return [tf.identity(t) for t in tensors]
    known = all(t.shape.is_fully_defined() for t in tensors)
    with _open_exchange(ranks) as (ops, comm):
        shapes = [t.shape for t in tensors] if known else []
        return list(ops.whale_broadcast(comm, list(tensors), key=key, root=root, shapes=shapes))


def all_to_all(ranks: Ranks, tensor: Any, key: str) -> Any:
    """Sends entry i of a tensor of shape ``[ranks, ...]`` to rank i, and returns what each rank has sent to this one.

    The result has the same shape; its entry i comes from rank i.
    """
    if ranks.size == 1:
        return tf.identity(tensor)
    ones = [1] * ranks.size
    with _open_exchange(ranks) as (ops, comm):
        # From a share of the senders and all receivers to all senders and a share of the receivers.
        sent = tensor[tf.newaxis]
        found = ops.whale_all_to_all(
            comm, sent, key=key, split_axis=1, split_sizes=ones, concat_axis=0, concat_sizes=ones
        )
        return found[:, 0]


def reduce_scatter(ranks: Ranks, tensor: Any, sizes: Sequence[int], key: str, reduction: str = "sum") -> Any:
    """Reduces tensors element-wise over the ranks, and returns this rank's ``sizes[rank]`` rows of the result."""
    if ranks.size == 1:
        return tf.identity(tensor)
    with _open_exchange(ranks) as (ops, comm):
        return ops.whale_reduce_scatter(comm, tensor, key=key, reduction=reduction, axis=0, sizes=list(sizes))


@contextmanager
def _open_exchange(ranks: Ranks) -> Iterator[tuple[Any, Any]]:
    """Yields (the op library, the communicator's handle), and converts errors of exchanges to CommError."""
    ops = whale_ops.load_ops()
    try:
        yield ops, ops.whale_communicator(communicator=ranks.comm_name, rank=ranks.rank)
    except tf.errors.OpError as error:
        raise_comm_error(error, ranks)
        raise
