"""Implements Horovod's exchanges that do not reduce: allgather, broadcast and alltoall, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from whale.distributed import tensors
from whale.errors import ProgramError
from whale.frontends.horovod.meeting import check_root, make_key, require_context
from whale.frontends.horovod.reductions import divide_by_size
from whale.runtime.context import Context


def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None) -> Any:
    """Concatenates the ranks' tensors along dimension 0, whose size may differ between ranks.

    Args:
      name: matches this call with the other ranks' calls; None: the order of calls does.
      ignore_name_scope: ignored.
      process_set: only the set of all ranks is supported.

    Raises:
      ProgramError: the tensor is a scalar.
    """
    context = require_context("hvd.allgather()", process_set)
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        raise ProgramError(
            "hvd.allgather concatenates along dimension 0, which a scalar does not have",
            given="a scalar tensor",
            expected="a tensor with one dimension or more",
            action="pass tf.reshape(tensor, [1])",
        )

    @tf.custom_gradient
    def differentiable(part: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            rows = tensors.all_gather(context, tf.shape(part)[:1], make_key(context, "allgather", f"{name or ''}.rows"))
            mean = _average_sum(context, upstream, f"{name or 'allgather'}.gradient")
            start = tf.reduce_sum(rows[: context.rank])
            return mean[start : start + rows[context.rank]]

        return tensors.all_gather(context, part, make_key(context, "allgather", name)), gradient

    return differentiable(value)


def grouped_allgather(
    tensors_: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> list[Any]:
    """Concatenates each of several tensors over the ranks, as ``allgather`` does."""
    names = [f"{name}.{i}" if name else None for i in range(len(tensors_))]
    return [allgather(tensor, named, ignore_name_scope, process_set) for tensor, named in zip(tensors_, names)]


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> Any:
    """Returns the root rank's tensor on every rank.

    Args:
      tensor: on the root rank, the tensor to send; on other ranks, a tensor of the same dtype and shape.
      root_rank: the rank that sends.
      name: matches this call with the other ranks' calls; None: the order of calls does.
      ignore_name_scope: ignored.
      process_set: only the set of all ranks is supported.
    """
    context = require_context("hvd.broadcast()", process_set)
    check_root(context, root_rank)

    @tf.custom_gradient
    def differentiable(part: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            mean = _average_sum(context, upstream, f"{name or 'broadcast'}.gradient")
            return mean if context.rank == root_rank else tf.zeros_like(mean)

        (sent,) = tensors.broadcast(context, [part], root_rank, make_key(context, "broadcast", name))
        return sent, gradient

    return differentiable(tf.convert_to_tensor(tensor))


def broadcast_group(variables: Sequence[Any], root_rank: int, name: str | None = None) -> list[Any]:
    """Returns the root rank's values of variables, in the order of ``variables``; sends one message per dtype."""
    context = require_context("hvd.broadcast_variables()", None)
    check_root(context, root_rank)
    found: dict[int, Any] = {}
    by_dtype: dict[Any, list[int]] = {}
    values = [tf.convert_to_tensor(variable) for variable in variables]
    for position, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(position)
    for dtype, positions in by_dtype.items():
        key = make_key(context, "broadcast", f"{name or 'variables'}.{dtype.name}")
        found.update(zip(positions, tensors.broadcast(context, [values[p] for p in positions], root_rank, key)))
    return [found[position] for position in range(len(values))]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Sends rows of a tensor to each rank, and returns the rows that this rank receives, in order of ranks.

    Args:
      splits: number of rows for each rank; None: the same number for each.
      name: matches this call with the other ranks' calls; None: the order of calls does.
      ignore_name_scope: ignored.
      process_set: only the set of all ranks is supported.

    Returns:
      The received rows; if ``splits`` is given, (received rows, number of rows from each rank).

    Raises:
      ProgramError: without ``splits``, the number of rows is not a multiple of the number of ranks.
    """
    context = require_context("hvd.alltoall()", process_set)
    value = tf.convert_to_tensor(tensor)
    if splits is None:
        if value.shape.rank and value.shape[0] is not None and value.shape[0] % context.size:
            raise ProgramError(
                "hvd.alltoall without splits cannot divide the rows equally among the ranks",
                given=f"{value.shape[0]} rows for {context.size} ranks",
                expected=f"a multiple of {context.size} rows, or splits",
                action="pass splits, one number for each rank",
            )
        rows = tf.shape(value)[0] // context.size
        return _exchange_parts(context, value, tf.fill([context.size], rows), name)[0]
    return _exchange_parts(context, value, tf.cast(tf.convert_to_tensor(splits), tf.int32), name)


def _exchange_parts(context: Context, value: Any, splits: Any, name: str | None) -> tuple[Any, Any]:
    """Sends ``splits[r]`` rows to each rank r, padded to the largest number of rows, since messages have equal sizes.

    Returns:
      (received rows, number of rows from each rank).
    """
    came = tensors.all_to_all(context, splits, make_key(context, "alltoall", f"{name or ''}.splits"))

    def exchange_rows(rows: Any, sent: Any, received: Any, named: str) -> Any:
        most = tensors.all_reduce(
            context, [tf.reduce_max(sent)], make_key(context, "allreduce", f"{named}.most"), "max"
        )[0]  # fmt: skip
        ragged = tf.RaggedTensor.from_row_lengths(rows, sent)
        shape = tf.concat([[context.size, most], tf.shape(rows)[1:]], axis=0)
        padded = ragged.to_tensor(shape=tf.concat([[context.size, -1], tf.shape(rows)[1:]], axis=0))
        room = most - tf.shape(padded)[1]
        widths = tf.concat([[[0, 0], [0, room]], tf.zeros([tf.rank(rows) - 1, 2], tf.int32)], axis=0)
        moved = tensors.all_to_all(
            context, tf.reshape(tf.pad(padded, widths), shape), make_key(context, "alltoall", named)
        )
        return tf.boolean_mask(moved, tf.sequence_mask(received, most))

    @tf.custom_gradient
    def differentiable(rows: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return exchange_rows(upstream, came, splits, f"{name or 'alltoall'}.gradient")

        return exchange_rows(rows, splits, came, name or "alltoall"), gradient

    return differentiable(value), came


def _average_sum(context: Context, tensor: Any, name: str) -> Any:
    (summed,) = tensors.all_reduce(context, [tensor], make_key(context, "allreduce", name))
    return divide_by_size(summed, context.size)
