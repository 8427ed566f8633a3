"""Reads the parts of a session's batch on the ranks that provide them, and joins them to the global batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from whale.capture.sharded import ShardedTensor
from whale.errors import ProgramError
from whale.frontends.tf1.one_rank import pack_error, pack_values, unpack_values
from whale.frontends.tf1.ranks_graph import Run
from whale.runtime.context import BatchReaders, Context
from whale.runtime.input.equal_inputs import FIRST_STEPS, refuse_other_values
from whale.runtime.input.local_batches import (
    ELEMENT_TIMEOUT_S,
    describe_failure,
    exchange,
    gather_whole_batch,
    rows_of_run,
)

Read = Callable[[], Sequence[np.ndarray]]


def find_batch_readers(context: Context, graph: tf.Graph) -> BatchReaders | None:
    """Returns the ranks that read or feed the parts of the batch for runs of ``graph``.

    None means that there are no parts: rank 0 reads the whole batch, or each rank feeds the whole batch.
    """
    if context.planning.meaning is not None:
        return context.planning.meaning.find_batch_readers(graph)
    if not context.has_local_batch:
        return None
    return BatchReaders(tuple(range(context.planned_size)), whole=context.scoping.stages_seen)


def read_parts(read: Read, names: Sequence[str], batches: BatchReaders, context: Context) -> list[np.ndarray]:
    """Reads this rank's part of a batch or, if the ranks need the whole batch, exchanges the parts and returns the
    whole; collective.

    Args:
      read: reads one part: values in the order of ``names``.
      names: names of the values, for messages.
      batches: which ranks read, how many parts each, and whether the ranks need the whole batch.
      context: the run.

    Raises:
      tf.errors.OpError: a rank could not read its part; raised on every rank.
      ProgramError: the parts cannot be joined.
    """
    if not context.has_other_processes:
        return join_parts([read() for _ in range(batches.turns)], names)
    if not batches.whole:
        try:
            return join_parts([read() for _ in range(batches.turns)], names)
        except tf.errors.OpError as error:
            exchange(describe_failure(error), context)
            raise
    said = b""
    if context.rank in batches.readers:
        try:
            said = pack_values(join_parts([read() for _ in range(batches.turns)], names))
        except tf.errors.OpError as error:
            said = pack_error(error)
    key, context.elements = f"whale/element/{context.elements}", context.elements + 1
    everyone = context.comms[0].allgather_bytes(key, said, ELEMENT_TIMEOUT_S)
    return join_parts([unpack_values(everyone[rank]) for rank in batches.readers], names)


def join_fed_parts(
    feeds: Mapping[tf.Tensor, np.ndarray], batches: BatchReaders | None, context: Context
) -> Mapping[tf.Tensor, np.ndarray]:
    """Joins the feeds of all readers if every rank needs the whole batch; otherwise returns ``feeds`` unchanged."""
    if batches is None or not batches.whole or not feeds or not context.has_other_processes:
        return feeds
    once = BatchReaders(batches.readers, whole=True)
    values = read_parts(lambda: list(feeds.values()), [t.name for t in feeds], once, context)
    return dict(zip(feeds, values))


def replace_fed_rows(feed_dict: Any, context: Context) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Replaces the values of type ShardedTensor in a feed_dict by arrays.

    If the program has stages, which take whole batches, the rows of all ranks are gathered; the call is collective
    then.

    Returns:
      (the feed_dict; name of each fed tensor of which this rank feeds only its own rows -> number of rows per rank).

    Raises:
      ProgramError: a ShardedTensor comes from another run.
    """
    if not feed_dict or not any(type(value) is ShardedTensor for value in feed_dict.values()):
        return feed_dict, {}
    feeds, rows = dict(feed_dict), {}
    for fed, value in feed_dict.items():
        if type(value) is not ShardedTensor:
            continue
        name, part = fed if isinstance(fed, str) else fed.name, rows_of_run(value, context)
        if context.scoping.stages_seen:
            with tf_context.eager_mode():
                part = gather_whole_batch(value, name, context)
        else:
            rows[name] = value.sizes
        feeds[fed] = part.numpy()
    return feeds, rows


def wrap_with_feed_check(run: Run, context: Context, name: str, number: int, fed: Collection[str]) -> Run:
    """Wraps ``run`` so that ranks compare the values that they feed, as arguments of a ``wh.function`` are compared.

    Each rank feeds the whole batch and uses its own rows, so that different values would go unnoticed. String scalars
    are not compared: they name files, which may differ.

    Args:
      run: a run of the session.
      name: name of the program, for messages.
      number: number of the program.
      fed: names of the tensors that every rank feeds as a whole.
    """
    every = context.config["debug.check_inputs"]
    if not every or not context.has_other_processes or not fed:
        return run
    calls = 0

    def run_compared(feeds: Mapping[tf.Tensor, np.ndarray], settings: tuple[Any, Any]) -> list[Any]:
        nonlocal calls
        if calls < FIRST_STEPS or not calls % every:
            whole = {t.name: v for t, v in feeds.items() if t.name in fed and (v.ndim or t.dtype != tf.string)}
            with tf_context.eager_mode():
                given = {name: tf.constant(value) for name, value in whole.items()}
                refuse_other_values(given, context, name, f"run {calls}", key=f"/{number}")
        calls += 1
        return run(feeds, settings)

    return run_compared


def join_parts(parts: Sequence[Sequence[np.ndarray]], names: Sequence[str]) -> list[np.ndarray]:
    """Joins the parts of a batch: rows are concatenated, other values must be equal in all parts.

    A value consists of rows if its size in dimension 0 is that of the part's first value that is not a scalar.

    Raises:
      ProgramError: values that are no rows differ, or rows have different shapes.
    """
    if len(parts) == 1:
        return [np.asarray(v) for v in parts[0]]
    rows = [next((np.shape(v)[0] for v in part if np.ndim(v)), None) for part in parts]
    found = []
    for name, values in zip(names, zip(*parts)):
        if all(np.ndim(v) and np.shape(v)[0] == n for v, n in zip(values, rows)):
            if len({np.shape(v)[1:] for v in values}) > 1:
                raise _make_unlike_error(name, [np.shape(v) for v in values], "rows of one shape")
            found.append(np.concatenate(values))
        elif all(np.array_equal(v, values[0]) for v in values[1:]):
            found.append(np.asarray(values[0]))
        else:
            shapes = [np.shape(v) for v in values]
            raise _make_unlike_error(
                name, shapes, f"as many rows as the other values of the batch ({rows[0]}), or equal values"
            )
    return found


def refuse_fixed_rows(shapes: Mapping[tf.Tensor, Sequence[int]]) -> None:
    """Raises a ProgramError if a graph fixes the number of rows, and the global batch has another number.

    Args:
      shapes: the shape of each fed tensor for the global batch.
    """
    for tensor, shape in shapes.items():
        fixed = tensor.shape.as_list() if tensor.shape.rank is not None else None
        if fixed and len(fixed) == len(shape) and fixed[0] not in (None, shape[0]) and shape:
            raise ProgramError(
                "the graph fixes the batch size of one rank, but it computes with the rows of all ranks",
                op=tensor.name,
                given=f"{fixed[0]} rows in the graph, {shape[0]} rows in the global batch",
                expected="an unknown size of dimension 0",
                action="batch without drop_remainder, create placeholders with shape [None, ...], and do not call "
                "set_shape with a batch size",
            )


def _make_unlike_error(name: str, shapes: Sequence[tuple[int, ...]], expected: str) -> ProgramError:
    return ProgramError(
        "the parts of a batch that the ranks read cannot be joined",
        value=name,
        given=f"shapes {', '.join(str(list(s)) for s in shapes)}",
        expected=expected,
        action="let the dataset yield values with the batch as dimension 0, and with equal shapes on all ranks",
    )
