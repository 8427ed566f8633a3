"""Reads the parts of a session's batch on the ranks that provide them, and joins them."""

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
    """Returns the ranks that provide the batches for runs of ``graph``; None: the first rank, or the feeding one,
    provides the whole batch.
    """
    if context.planning.meaning is not None:
        return context.planning.meaning.find_batch_readers(graph)
    if not context.has_local_batch:
        return None
    return BatchReaders(tuple(range(context.planned_size)), whole=context.scoping.stages_seen)


def read_parts(read: Read, names: Sequence[str], batches: BatchReaders, context: Context) -> list[np.ndarray]:
    """Reads this rank's part of a batch, or the whole batch on all ranks. Collective.

    Args:
      read: reads one part.
      names: of the values, for messages.

    Raises:
      tf.errors.OpError: a rank could not read its part; on every rank.
      ProgramError: the parts do not fit together.
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
    """Joins the feeds of all readers if every rank needs the whole batch; else returns the feeds unchanged."""
    if batches is None or not batches.whole or not feeds or not context.has_other_processes:
        return feeds
    once = BatchReaders(batches.readers, whole=True)
    values = read_parts(lambda: list(feeds.values()), [t.name for t in feeds], once, context)
    return dict(zip(feeds, values))


def replace_fed_rows(feed_dict: Any, context: Context) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Replaces a rank's rows of batches (`ShardedTensor`) in ``feed_dict`` by tensors; also returns the rows of every
    rank.

    Steps with stages take whole batches: their parts are gathered. Collective then.

    Raises:
      ProgramError: the rows are those of another run.
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
    """Wraps ``run`` so that its feeds are compared between the ranks, each of which feeds the whole batch and takes
    rows of it.

    That is done as for arguments of steps. Single texts name files, which may be others on each rank.

    Args:
      name, number: of the program.
      fed: names of what every rank feeds.
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
    """Joins the values of several parts: concatenates rows; other values must be equal in all parts.

    Rows are values that have as many as the first that has any.

    Raises:
      ProgramError: other values differ, or rows have different shapes.
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
    """Raises ProgramError if a graph was built for a fixed number of rows, and the global batch has another."""
    for tensor, shape in shapes.items():
        fixed = tensor.shape.as_list() if tensor.shape.rank is not None else None
        if fixed and len(fixed) == len(shape) and fixed[0] not in (None, shape[0]) and shape:
            raise ProgramError(
                "the graph is built for the rows of one rank's batch, and computes those of all ranks",
                op=tensor.name,
                given=f"{fixed[0]} rows in the graph, {shape[0]} of the global batch",
                expected="a dimension 0 that the graph leaves open",
                action="batch without drop_remainder, make placeholders with None rows, and leave set_shape out",
            )


def _make_unlike_error(name: str, shapes: Sequence[tuple[int, ...]], expected: str) -> ProgramError:
    return ProgramError(
        "parts of a batch do not fit together",
        value=name,
        given=f"shapes {', '.join(str(list(s)) for s in shapes)}",
        expected=expected,
        action="have the dataset yield batches whose values begin with the rows, all of one shape",
    )
