"""Draws the batches for a step that calls ``next(iterator)`` itself: they are read before the step runs, and passed to
it as arguments.

Decision: 0061.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale.capture.captured import Traced
from whale.capture.sharded import IteratorReads, ShardedTensor, is_iterator, read_inside
from whale.capture.signature import Arguments
from whale.distributed.msgpack_values import pack, unpack
from whale.errors import ProgramError
from whale.runtime.context import Context
from whale.runtime.input.dataset_position import ShardedIterator
from whale.runtime.input.dataset_rows import refuse_other_orders
from whale.runtime.input.local_batches import ELEMENT_TIMEOUT_S, describe_brought, exchange, rows_of_values


@dataclass(frozen=True)
class Source:
    """Represents an iterator from which a step reads a batch.

    Attributes:
      number: index among the flat arguments of the one that is the iterator; negative: the iterator is no argument.
      iterator: the iterator, if it is no argument, such as one from a closure.
    """

    number: int = -1
    iterator: Any = None

    def find(self, arguments: Arguments) -> Any:
        """Returns the iterator to read for a call with these arguments."""
        return self.iterator if self.number < 0 else arguments.leaves[self.number]


def sources(drawing: IteratorReads, arguments: Arguments) -> tuple[Source, ...]:
    """Returns the sources of the batches that a traced step reads, in the order of reading."""
    numbers = {id(leaf): i for i, leaf in enumerate(arguments.leaves) if is_iterator(leaf)}
    return tuple(Source(numbers[id(one)]) if id(one) in numbers else Source(iterator=one) for one in drawing.iterators)


def reads_itself(captured: Traced, drawing: IteratorReads, arguments: Arguments) -> bool:
    """Returns True if the step's graph reads an iterator argument itself, as in a loop, so that no batch can be drawn
    for it.

    Raises:
      ProgramError: the step also reads this or another iterator in a form for which batches are drawn.
    """
    handles = {id(tensor) for _, tensor in captured.captures}

    def read(iterator: Any) -> bool:
        return id(getattr(iterator, "_iterator_resource", None)) in handles

    given = next((leaf for leaf in arguments.leaves if is_iterator(leaf) and read(leaf)), None)
    both = next(filter(read, drawing.iterators), given if drawing.iterators else None)
    if both is not None:
        raise read_inside(both)
    return given is not None


def batches_key(batches: Sequence[Any]) -> Hashable:
    """Returns a key for batches that a step has read from iterators: batches with equal keys have equal structure,
    types and shapes, so that the step needs only one trace for them.
    """
    leaves = tf.nest.flatten(batches, expand_composites=True)
    structure = tf.nest.map_structure(lambda _: 0, batches)
    shapes = [(type(t), t.dtype, t._shape_tuple()) for t in leaves]
    return repr(structure), *shapes


def draw(iterator: Any, context: Context) -> Any:
    """Returns the next batch of an iterator, for a step that reads it: the whole batch, or this rank's part
    (``wh.shard``, ``batch.mode=local``).

    If the ranks would read in different orders, all get the first rank's batch; collective then.

    Raises:
      tf.errors.OutOfRangeError: there is no further batch.
    """
    if context.elastic is not None:
        return context.elastic.drawn(lambda: _draw(iterator, context))
    return _draw(iterator, context)


def _draw(iterator: Any, context: Context) -> Any:
    if isinstance(iterator, ShardedIterator):
        try:
            return iterator.read()
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None
    if context.has_local_batch:
        return _as_parts(iterator.get_next(), context)
    if context.has_other_processes and not _reads_alike(iterator):
        return _read_on_first_rank(iterator, context)
    return iterator.get_next()


def _reads_alike(iterator: Any) -> bool:
    """Returns True if all ranks read the same batches in the same order from the iterator's dataset."""
    try:
        refuse_other_orders(iterator._dataset)
    except ProgramError:
        return False
    return True


def _read_on_first_rank(iterator: Any, context: Context) -> Any:
    """Returns the first rank's batch on all ranks. Each rank reads a batch of its own as well, so that all come to the
    end together.
    """
    key, context.elements = f"whale/element/{context.elements}", context.elements + 1
    comm, said = context.comms[0], None
    try:
        element = iterator.get_next()
        leaves = tf.nest.flatten(element, expand_composites=True)
        if context.rank == 0:
            said = pack([t.numpy() for t in leaves])
    except tf.errors.OutOfRangeError as error:
        if context.rank == 0:
            comm.broadcast_bytes(key, b"", 0, ELEMENT_TIMEOUT_S)
        raise error
    first = unpack(comm.broadcast_bytes(key, said, 0, ELEMENT_TIMEOUT_S))
    tensors = [tf.constant(value, t.dtype) for value, t in zip(first, leaves)]
    return tf.nest.pack_sequence_as(element, tensors, expand_composites=True)


def _as_parts(element: Any, context: Context) -> Any:
    """Returns a rank's own batch with its tensors marked as parts of the global batch; collective."""
    tensors = tf.nest.flatten(element, expand_composites=True)
    names = [f"batch_{i}" for i in range(len(tensors))]
    sizes = rows_of_values(exchange(describe_brought(tensors), context), names)
    parts = [t if rows is None else ShardedTensor(t, rows, context.rank) for t, rows in zip(tensors, sizes)]
    return tf.nest.pack_sequence_as(element, parts, expand_composites=True)
