"""Sums and averages tensors over the ranks: eagerly, inside a tf.function, or in a graph of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale.distributed import tensors
from whale.errors import ProgramError
from whale.frontends.horovod.meeting import make_key, require_context
from whale.frontends.horovod.reductions import (
    Average,
    Compression,
    ReduceOp,
    Sum,
    divide_by_size,
    find_reduction,
    multiply,
)
from whale.runtime.context import Context


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the average of the ranks' tensors on every rank, or another reduction if ``op`` says so.

    For tf.IndexedSlices the result is the concatenation of all ranks' slices.

    Args:
      tensor: a tensor, variable, NumPy or Python value of the same shape and dtype on all ranks, or tf.IndexedSlices.
      average: deprecated: True for an average, False for a sum.
      compression: a class of ``hvd.Compression``: the dtype in which the tensor is sent.
      op: the reduction; None: ``Average``.
      prescale_factor, postscale_factor: factors by which to multiply before and after the reduction.
      name: matches this call with the other ranks' calls; None: the order of calls does.
      process_set: only the set of all ranks is supported.
      device_dense, device_sparse, ignore_name_scope: ignored, only accepted because Horovod has them.

    Raises:
      ProgramError: the reduction or the process set is not supported, or tf.IndexedSlices come with factors.
      CommError: the ranks pass different shapes or dtypes, or a rank is gone.
    """
    return grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
        process_set, ignore_name_scope, name,
    )[0]  # fmt: skip


def grouped_allreduce(
    tensors_: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors, each as ``allreduce`` does; tensors of one dtype are sent in one message."""
    context = require_context("hvd.allreduce()", process_set)
    found = find_reduction(op, average)
    values = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in tensors_]
    whole = [i for i, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
    if len(whole) < len(values):
        _check_slices(found, prescale_factor, postscale_factor)
    results: list[Any] = [
        value if i in whole else _gather_slices(context, value, found, name) for i, value in enumerate(values)
    ]
    packed = [compression.compress(values[i]) for i in whole]
    by_dtype: dict[Any, list[int]] = {}
    for position, (value, _) in enumerate(packed):
        by_dtype.setdefault(value.dtype, []).append(position)
    for positions in by_dtype.values():
        moved = _reduce_message(
            context, [packed[p][0] for p in positions], found, prescale_factor, postscale_factor, name,
            [(compression, packed[p][1]) for p in positions],
        )  # fmt: skip
        for position, value in zip(positions, moved):
            results[whole[position]] = value
    return results


def _reduce_message(
    context: Context,
    values: list[Any],
    op: ReduceOp,
    before: float,
    after: float,
    name: str | None,
    packing: list[tuple[Any, Any]],
) -> list[Any]:
    """Reduces tensors of one dtype in one message, and decompresses the results.

    Gradients of the results are reduced over the ranks in the same way.

    Args:
      before, after: factors by which to multiply before and after the reduction.
      packing: for each tensor, (its compressor, the context that its ``compress`` returned).
    """

    def exchange_parts(parts: Sequence[Any]) -> list[Any]:
        summed = tensors.all_reduce(
            context,
            [multiply(part, before) for part in parts],
            make_key(context, "allreduce", name),
            "sum" if op is Average else op.value,
        )
        return [multiply(divide_by_size(part, context.size) if op is Average else part, after) for part in summed]

    @tf.custom_gradient
    def differentiable(*parts: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            if op not in (Average, Sum):
                raise ProgramError(
                    "this reduction over ranks has no gradient",
                    given=f"hvd.allreduce(op=hvd.{op.name.capitalize()})",
                    expected="hvd.Average or hvd.Sum",
                    action="use one of these, or put tf.stop_gradient around the call",
                )
            return exchange_parts(upstream)

        return exchange_parts(parts), gradient

    return [unpack.decompress(part, ctx) for (unpack, ctx), part in zip(packing, differentiable(*values))]


def _check_slices(op: ReduceOp, before: float, after: float) -> None:
    if op not in (Average, Sum) or before != 1.0 or after != 1.0:
        raise ProgramError(
            "tf.IndexedSlices can only be summed or averaged over the ranks, by gathering the slices of all",
            given=f"tf.IndexedSlices with op={op.name}, prescale_factor={before}, postscale_factor={after}",
            expected="hvd.Average or hvd.Sum without factors",
            action="convert them with tf.convert_to_tensor, or use sparse_as_dense=True",
        )


def _gather_slices(context: Context, slices: tf.IndexedSlices, op: ReduceOp, name: str | None) -> tf.IndexedSlices:
    """Concatenates the ranks' slices, which stands for their sum; for ``Average`` values are divided by the number of
    ranks.
    """
    name = name or "slices"
    values = tensors.all_gather(context, slices.values, make_key(context, "allgather", f"{name}.values"))
    indices = tensors.all_gather(context, slices.indices, make_key(context, "allgather", f"{name}.indices"))
    values = divide_by_size(values, context.size) if op is Average else values
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the average (or sum) of the ranks' tensors.

    If the number of rows is not a multiple of the number of ranks, the first ranks get one row more. For the arguments
    see ``allreduce``.

    Raises:
      ProgramError: the number of rows is not known when the graph is built, or another reduction is asked for.
    """
    context = require_context("hvd.reducescatter()", process_set)
    found = find_reduction(op, None, (Average, Sum))
    value, ctx = compression.compress(tf.convert_to_tensor(tensor))
    if not value.shape.rank or value.shape[0] is None:
        raise ProgramError(
            "hvd.reducescatter needs to know the number of rows when the graph is built",
            given=f"a tensor of shape {value.shape}",
            expected="a known size of dimension 0",
            action="give dimension 0 a size in the input_signature, or use hvd.allreduce and take this rank's rows",
        )
    whole, more = divmod(value.shape[0], context.size)
    sizes = [whole + (number < more) for number in range(context.size)]

    @tf.custom_gradient
    def differentiable(part: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            factor = prescale_factor * postscale_factor * (context.size if found is Sum else 1)
            key = make_key(context, "allgather", f"{name or 'reducescatter'}.gradient")
            return tensors.all_gather(context, multiply(upstream, factor), key)

        key = make_key(context, "reducescatter", name)
        kept = tensors.reduce_scatter(context, multiply(part, prescale_factor), sizes, key)
        return multiply(divide_by_size(kept, context.size) if found is Average else kept, postscale_factor), gradient

    return compression.decompress(differentiable(value), ctx)


def grouped_reducescatter(
    tensors_: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Calls ``reducescatter`` for each of several tensors."""
    return [
        reducescatter(
            tensor, device_dense, compression, op, None, process_set,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        )
        for tensor in tensors_
    ]  # fmt: skip


def reduce_in_buckets(
    values: Sequence[Any],
    op: ReduceOp,
    compression: Any,
    before: float,
    after: float,
    name: str,
    reduce: Callable[..., list[Any]] = grouped_allreduce,
) -> list[Any]:
    """Reduces gradients over the ranks, several per message; a gradient of None stays None.

    The backward pass computes the gradients of the last variables first. So buckets are filled from the end of the
    list, with up to ``communication.bucket_bytes`` each, and a bucket's gradients are ready at about the same time.

    Args:
      before, after: factors by which to multiply before and after the reduction.
      name: prefix of the messages' names.
      reduce: reduces one bucket.
    """
    limit = require_context(name, None).config["communication.bucket_bytes"]
    results, bucket, held, number = list(values), [], 0, 0  # type: ignore[var-annotated]

    def send() -> None:
        nonlocal bucket, held, number
        if bucket:
            sent = reduce(
                [values[i] for i in bucket], op=op, compression=compression,
                prescale_factor=before, postscale_factor=after, name=f"{name}.{number}",
            )  # fmt: skip
            for position, value in zip(bucket, sent):
                results[position] = value
            number += 1
        bucket, held = [], 0

    for position in reversed(range(len(values))):
        value = values[position]
        if value is None:
            continue
        n_bytes = _count_bytes(value)
        if n_bytes is None or held + n_bytes > limit:
            send()
        bucket.append(position)
        held += limit + 1 if n_bytes is None else n_bytes
    send()
    return results


def _count_bytes(value: Any) -> int | None:
    """Returns the size of a tensor in bytes; None for an unknown size, and for slices, which are sent on their own."""
    if isinstance(value, tf.IndexedSlices) or not value.shape.is_fully_defined():
        return None
    return int(value.shape.num_elements() * value.dtype.size)
