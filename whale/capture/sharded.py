"""Defines the arguments of a step that are no plain tensors: one rank's rows of a global batch, and iterators.

Decision: 0023.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from whale.capture.open_sizes import note_open_shapes
from whale.errors import ProgramError

# The object that draws the batches of the step that is being traced.
drawing: contextvars.ContextVar[IteratorReads | None] = contextvars.ContextVar("drawing", default=None)


class ShardedTensor:
    """Represents a global batch by the rows that this rank has read, and the shape of the whole batch.

    A step of ``wh.function`` accepts it in place of the whole tensor. Outside of a step it is not a tensor: to compute
    with it is an error.

    Args:
      local: this rank's rows, [sizes[rank], ...].
      sizes: number of rows on each rank; the global batch has their sum.
      rank: the rank that holds ``local``.

    Attributes:
      source: where ``local`` was read: (iterator, number of the batch, number of the leaf in the batch's structure).
        None if it cannot be read again.

    Raises:
      ProgramError: ``local`` does not have ``sizes[rank]`` rows.
    """

    __slots__ = ("__weakref__", "_key", "local", "rank", "shape", "sizes", "source")

    def __init__(self, local: tf.Tensor, sizes: tuple[int, ...], rank: int) -> None:
        dims = local.shape.as_list()
        if dims[0] != sizes[rank]:
            raise ProgramError(
                "a rank's part of a batch has another number of rows than its share",
                given=f"{dims[0]} rows on rank {rank}",
                expected=f"{sizes[rank]} rows: the rows per rank of the global batch are {list(sizes)}",
                action="let wh.shard divide the batches, or pass as many rows on each rank as the list says",
            )
        self.local, self.sizes, self.rank = local, sizes, rank
        self.source: tuple[Any, int, int] | None = None
        self.shape = tf.TensorShape([sum(sizes), *dims[1:]])
        self._key = (tuple(self.shape.as_list()), sizes)

    @property
    def dtype(self) -> tf.DType:
        """Returns the element type, which the local rows and the whole tensor share."""
        return self.local.dtype

    def _shape_tuple(self) -> tuple[Any, ...]:
        """Returns a key of shape and rows per rank, where TensorFlow expects the shape of an eager tensor for a trace's
        key.
        """
        return self._key

    def __repr__(self) -> str:
        return f"<wh.ShardedTensor: shape={self.shape}, dtype={self.dtype.name}, rows={list(self.sizes)}>"

    def __tf_tensor__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ProgramError(
            "a wh.ShardedTensor, a rank's part of a global batch, is used as a tensor",
            given=f"{self!r}, of which rank {self.rank} holds {self.sizes[self.rank]} rows",
            expected="an argument of a step of wh.function, which computes with the whole batch",
            action="move the computation into the step, or use `.local` for this rank's rows alone",
        )


# Operators that raise an error. == and != still compare identity, so that a ShardedTensor can be found in a list.
_OPERATORS = """add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge neg invert abs
radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor getitem len iter bool int float index"""
for _name in _OPERATORS.split():
    setattr(ShardedTensor, f"__{_name}__", ShardedTensor._refuse)


def is_iterator(value: Any) -> bool:
    """Returns True if ``value`` is an eager iterator (of tf.data or of Whale), from which batches can be drawn for a
    step.
    """
    if isinstance(value, iterator_ops.OwnedIterator):
        return isinstance(value._iterator_resource, tf.__internal__.EagerTensor)
    return bool(getattr(value, "_whale_iterator", False))


def read_inside(iterator: Any) -> ProgramError:
    """Returns the error for a step that calls ``next(iterator)`` in a loop, branch or nested function.

    Whale draws batches before the step runs, so it needs to know how many the step reads.
    """
    return ProgramError(
        "a step reads an iterator inside a loop, a branch or a function",
        given=repr(iterator),
        expected="a batch that is an argument of the step, or next(iterator) outside of loops, branches and functions",
        action="call next(iterator) before the loop, or loop in Python and call the step once per batch",
    )


class IteratorReads:
    """Records which batches a step takes from iterators while it is traced, and makes them inputs of its program.

    ``next(iterator)`` in the step's own graph draws a batch eagerly, and returns placeholders for its tensors. Inside a
    loop, a branch or a nested function, the iterator is read by an op of the program instead, which every rank runs.

    Args:
      draw: returns the next batch of an iterator.
      batches: batches that were drawn before the trace; they are used first.

    Attributes:
      iterators: the iterators that the step has read, one per batch, in order.
      batches: the batches, each a structure of tensors or ShardedTensors.
      inputs: the placeholders of the batches' tensors, in flat order.
      inside: True if an iterator was read inside a loop, a branch or a nested function.
    """

    def __init__(self, draw: Callable[[Any], Any], batches: Sequence[Any] = ()) -> None:
        self.iterators: list[Any] = []
        self.batches = list(batches)
        self.inputs: list[tf.Tensor] = []
        self.inside = False
        self._draw, self._graph = draw, None

    @property
    def tensors(self) -> list[Any]:
        """Returns the values to pass for ``inputs``: the tensors of all batches, in flat order."""
        return [t for batch in self.batches for t in tf.nest.flatten(batch, expand_composites=True)]

    def repeat(self) -> IteratorReads:
        """Returns an IteratorReads to trace the same step again with the same batches."""
        return IteratorReads(self._draw, self.batches)

    def enter(self) -> None:
        """Records the current default graph as the step's own graph, in which batches may be drawn.

        A step that creates variables is traced more than once: each trace reads the same batches, from the first on.
        """
        self._graph = tf.compat.v1.get_default_graph()
        self.iterators, self.inputs, self.inside = [], [], False

    @contextmanager
    def install(self) -> Iterator[None]:
        """Redirects ``next(iterator)`` in traced code to ``take`` inside of the context."""
        usual = iterator_ops.OwnedIterator._next_internal

        def take_in_step(iterator: Any) -> Any:
            here = not tf.executing_eagerly() and is_iterator(iterator)
            return self.take(iterator, lambda: usual(iterator)) if here else usual(iterator)

        iterator_ops.OwnedIterator._next_internal = take_in_step
        token = drawing.set(self)
        try:
            yield
        finally:
            drawing.reset(token)
            iterator_ops.OwnedIterator._next_internal = usual

    def take(self, iterator: Any, usual: Callable[[], Any] | None = None) -> Any:
        """Returns the next batch of ``iterator`` for the code being traced.

        In the step's own graph the batch is a structure of placeholders. Inside a loop, branch or nested function it is
        what ``usual`` returns.

        Args:
          usual: adds TensorFlow's op that reads the iterator to the current graph; None: there is no such op.

        Raises:
          ProgramError: the step reads iterators both in its own graph and in a loop, branch or nested function; or it
            reads one there that has no ``usual``.
        """
        if self.inside or tf.compat.v1.get_default_graph() is not self._graph:
            if self.iterators or usual is None:
                raise read_inside(iterator)
            self.inside = True
            return usual()
        number = len(self.iterators)
        if number == len(self.batches):
            with tf.init_scope():
                self.batches.append(self._draw(iterator))
        self.iterators.append(iterator)
        batch = self.batches[number]
        leaves = tf.nest.flatten(batch, expand_composites=True)
        made = [tf.compat.v1.placeholder(t.dtype, t.shape, f"batch_{number}_{i}") for i, t in enumerate(leaves)]
        self.inputs += made
        specs = tf.nest.flatten(getattr(iterator, "element_spec", ()), expand_composites=True)
        note_open_shapes(made, [getattr(spec, "shape", None) for spec in specs])
        return tf.nest.pack_sequence_as(batch, made, expand_composites=True)
