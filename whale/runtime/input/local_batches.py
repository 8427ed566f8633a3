"""Forms the global batch of the rows that the ranks bring: they exchange dtypes and shapes, from which the rows of each
rank follow.

Of a batch of which every rank has read a part, a step gets its own rows (``rows_of_run``), or the whole batch if the
plan divides it differently (``gather_whole_batch``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor

import whale_ops
from whale.capture.sharded import ShardedTensor
from whale.capture.signature import Arguments
from whale.distributed.faults import raise_comm_error
from whale.errors import ProgramError
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.axes import data_coordinates
from whale.passes.analysis.batch import rows_of_ranks
from whale.runtime.context import Context

ELEMENT_TIMEOUT_S = 3600.0  # waits until a rank has a batch: a pipeline may take long to fill its buffers


class Brought(msgspec.Struct, frozen=True):
    """Represents what a rank brings to a batch.

    Attributes:
      values: (dtype, shape) of each tensor.
      ended: whether the rank has no further batch.
      error_code: TensorFlow's code of the error that the rank met; 0: none.
      error: its message.
    """

    values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ended: bool = False
    error_code: int = 0
    error: str = ""


def rows_of(rows: int, context: Context) -> tuple[int, ...]:
    """Returns how many of a batch's rows each rank of the run has, according to `batch.shares` and the mesh."""
    coordinates = data_coordinates(context.mesh, context.size, context.rank_order)
    return rows_of_ranks(rows, context.size, context.config["batch.shares"], coordinates)


def take_rows(batch: np.ndarray, rows: slice | np.ndarray) -> tf.Tensor:
    """Returns rows of an array as a tensor in the host's memory; sooner than TensorFlow's own slices do.

    Args:
      batch: the array, or a tensor in the host's memory as NumPy sees it.
      rows: which ones, a slice or indices, [rows].
    """
    return EagerTensor(batch[rows], "/device:CPU:0", None)


def find_first_row(sizes: Sequence[int], context: Context) -> int:
    """Returns where this rank's rows begin in a batch.

    Args:
      sizes: rows of each rank, by rank; the batch has them in the order of the mesh.
    """
    order = context.rank_order or tuple(range(context.size))
    return sum(sizes[rank] for rank in order[: order.index(context.rank)])


def describe_brought(values: Sequence[Any]) -> Brought:
    """Returns the message with the dtypes and shapes of the tensors or arrays that a rank brings."""
    return Brought(tuple((tf.as_dtype(v.dtype).name, tuple(v.shape)) for v in values))


def describe_failure(error: tf.errors.OpError) -> Brought:
    """Returns the message of a rank that could not read its batch."""
    return Brought(error_code=error.error_code, error=error.message or "")


def exchange(mine: Brought, context: Context) -> list[Brought]:
    """Returns what each rank brings, in order of ranks. Collective between processes; in a dry run all ranks count as
    equal to this one.

    Raises:
      tf.errors.OpError: the error of the first rank that met one, on every rank.
    """
    if context.planning.dry is not None:
        return [mine] * context.planning.dry.size
    key, context.elements = f"whale/element/{context.elements}", context.elements + 1
    said = context.comms[0].allgather_bytes(key, msgspec.msgpack.encode(mine), ELEMENT_TIMEOUT_S)
    everyone = [msgspec.msgpack.decode(data, type=Brought) for data in said]
    for other in everyone:
        if other.error_code:
            raise tf.compat.v1.errors.exception_type_from_error_code(other.error_code)(None, None, other.error)
    return everyone


def rows_of_values(
    everyone: Sequence[Brought], names: Sequence[str], marked: Collection[str] = ()
) -> list[tuple[int, ...] | None]:
    """Finds out which values are parts of the batch, and how many rows each rank brings.

    Args:
      everyone: what each rank brings; ranks that have ended bring no rows.
      names: names of the values, for messages and for ``marked``.
      marked: names of the values that are parts of the batch; empty: those that on every rank have as many rows as the
        first value that has rows.

    Returns:
      for each value, the number of rows on every rank; None for a value that is no part of the batch, but equal on all
      ranks.

    Raises:
      ProgramError: the ranks' values do not fit together; names the ranks.
    """
    bringing = [(rank, b.values) for rank, b in enumerate(everyone) if not b.ended]
    first_rank, first = bringing[0]
    for rank, values in bringing:
        if len(values) != len(first):
            raise _mismatch("number of values", first_rank, len(first), rank, len(values))
    rows = [[values[i][1][:1] for _, values in bringing] for i in range(len(first))]
    divisible = [all(r) and first[i][0] not in UNMOVABLE for i, r in enumerate(rows)]
    usual = next((r for r, ok in zip(rows, divisible) if ok), None)
    found: list[tuple[int, ...] | None] = []
    for i, name in enumerate(names):
        part = divisible[i] and (name in marked if marked else rows[i] == usual)
        for rank, values in bringing:
            (dtype, shape), (other_dtype, other_shape) = first[i], values[i]
            if dtype != other_dtype or shape[part:] != other_shape[part:]:
                raise _mismatch(name, first_rank, f"{dtype}{list(shape)}", rank, f"{other_dtype}{list(other_shape)}")
        sizes = [0] * len(everyone)
        for rank, values in bringing if part else ():
            sizes[rank] = values[i][1][0]
        found.append(tuple(sizes) if part else None)
    return found


def local_arguments(arguments: Arguments, context: Context) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call for which every rank brings its own batch, with tensors of
    the batch marked as parts.

    Collective, unless an argument is marked already, so that its rank knows the rows of the others.
    """
    tensors = list(arguments.tensors)
    if tensors and not any(isinstance(t, ShardedTensor) for t in tensors):
        sizes = rows_of_values(
            exchange(describe_brought(tensors), context), arguments.names, context.config["batch.inputs"]
        )
        tensors = [
            t if rows is None else ShardedTensor(tf.convert_to_tensor(t), rows, context.rank)
            for t, rows in zip(tensors, sizes)
        ]
    return arguments.rebuild(tensors)


def _mismatch(what: str, rank: int, given: object, other: int, other_given: object) -> ProgramError:
    return ProgramError(
        "the ranks' parts do not form one batch",
        value=what,
        given=f"rank {rank} has {given}, rank {other} has {other_given}",
        expected="equal dtypes, and equal shapes but for the rows of a batch",
        action="pass examples of one shape on every rank; name the inputs that have the batch's rows in batch.inputs",
    )


def gather_whole_batch(part: ShardedTensor, name: str, context: Context) -> tf.Tensor:
    """Gathers all rows of a batch, [sum(part.sizes), ...], on every rank. Collective.

    Args:
      part: this rank's rows.
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
    """Returns what a lowered step takes for an argument: this rank's rows of a part of a batch, other values unchanged.

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
