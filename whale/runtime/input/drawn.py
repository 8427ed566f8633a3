"""Draws batches that a step reads itself from an iterator of the script: they are read before it, as its arguments.

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
    """An iterator of which a step reads a batch: the argument of this number, or one that the step knows anyway."""

    number: int = -1
    iterator: Any = None

    def find(self, arguments: Arguments) -> Any:
        """Returns the iterator, for a call with these arguments."""
        return self.iterator if self.number < 0 else arguments.leaves[self.number]


def sources(drawing: IteratorReads, arguments: Arguments) -> tuple[Source, ...]:
    """Returns the sources from which a traced step reads its batches, in order."""
    numbers = {id(leaf): i for i, leaf in enumerate(arguments.leaves) if is_iterator(leaf)}
    return tuple(Source(numbers[id(one)]) if id(one) in numbers else Source(iterator=one) for one in drawing.iterators)


def reads_itself(captured: Traced, drawing: IteratorReads, arguments: Arguments) -> bool:
    """Tells whether the step reads an iterator that is an argument, in a loop or in another form.

    Raises:
      ProgramError: it reads others, or the same one, in a form that is drawn for it.
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
    """Returns a key that is equal for batches that one trace serves."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    structure = tf.nest.map_structure(lambda _: 0, batches)
    shapes = [(type(t), t.dtype, t._shape_tuple()) for t in leaves]
    return repr(structure), *shapes


def draw(iterator: Any, context: Context) -> Any:
    """Draws the next batch of an iterator: whole, or this rank's part where it reads no more, or where each has its
    own.

    Where the ranks would read in different orders, the first rank's batch is that of all. Collective then.

    Raises:
      tf.errors.OutOfRangeError: there is none.
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
    """Tells whether each rank reads the same batches in the same order."""
    try:
        refuse_other_orders(iterator._dataset)
    except ProgramError:
        return False
    return True


def _read_on_first_rank(iterator: Any, context: Context) -> Any:
    """Returns the first rank's batch on all ranks; each reads one, so that they come to the end together."""
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
    """Marks a rank's own batch as its part of the global one."""
    tensors = tf.nest.flatten(element, expand_composites=True)
    names = [f"batch_{i}" for i in range(len(tensors))]
    sizes = rows_of_values(exchange(describe_brought(tensors), context), names)
    parts = [t if rows is None else ShardedTensor(t, rows, context.rank) for t, rows in zip(tensors, sizes)]
    return tf.nest.pack_sequence_as(element, parts, expand_composites=True)
