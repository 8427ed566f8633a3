"""Exchanges tensors for a script that itself calls collectives: at once, or inside a graph that it builds.

Every rank makes the same exchanges: under equal keys, the n-th use of a key on one rank meets the n-th on the others.
With one rank nothing is sent.
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
    """Reduces tensors element-wise over the ranks by "sum", "min", "max" or "prod". They have one dtype, and travel as
    one message.
    """
    if ranks.size == 1:
        return [tf.identity(t) for t in tensors]
    with _open_exchange(ranks) as (ops, comm):
        return list(ops.whale_all_reduce(comm, list(tensors), key=key, reduction=reduction))


def all_gather(ranks: Ranks, tensor: Any, key: str) -> Any:
    """Concatenates the ranks' tensors along dimension 0, in which their sizes may differ."""
    if ranks.size == 1:
        return tf.identity(tensor)
    with _open_exchange(ranks) as (ops, comm):
        return ops.whale_all_gather(comm, [tensor], key=key)[0]


def broadcast(ranks: Ranks, tensors: Sequence[Any], root: int, key: str) -> list[Any]:
    """Returns the root's tensors, of one dtype, on every rank; the others' tensors give only number and dtype."""
    if ranks.size == 1:
        return [tf.identity(t) for t in tensors]
    known = all(t.shape.is_fully_defined() for t in tensors)
    with _open_exchange(ranks) as (ops, comm):
        shapes = [t.shape for t in tensors] if known else []
        return list(ops.whale_broadcast(comm, list(tensors), key=key, root=root, shapes=shapes))


def all_to_all(ranks: Ranks, tensor: Any, key: str) -> Any:
    """Exchanges ``[ranks, ...]``, one entry for each rank, for ``[ranks, ...]``, one entry from each rank."""
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
    """Reduces element-wise over the ranks; each keeps its own rows of the result, ``sizes[rank]`` of them."""
    if ranks.size == 1:
        return tf.identity(tensor)
    with _open_exchange(ranks) as (ops, comm):
        return ops.whale_reduce_scatter(comm, tensor, key=key, reduction=reduction, axis=0, sizes=list(sizes))


@contextmanager
def _open_exchange(ranks: Ranks) -> Iterator[tuple[Any, Any]]:
    """Yields the op library and the communicator's handle; raises errors of exchanges as those of Whale."""
    ops = whale_ops.load_ops()
    try:
        yield ops, ops.whale_communicator(communicator=ranks.comm_name, rank=ranks.rank)
    except tf.errors.OpError as error:
        raise_comm_error(error, ranks)
        raise
