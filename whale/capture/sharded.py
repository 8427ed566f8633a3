"""Defines arguments of a step other than plain tensors: a rank's rows of a sharded tensor, and iterators.

Decision: 0023.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from whale.errors import ProgramError

# The object that draws the batches of the step that is being traced.
drawing: contextvars.ContextVar[IteratorReads | None] = contextvars.ContextVar("drawing", default=None)


class ShardedTensor:
    """One rank's part of a global batch: the rows that this rank read, and the shape of the whole.

    A step of ``wh.function`` takes it where it would take the whole tensor. It is no tensor itself: computing with it
    outside a step is an error.

    Args:
      local: this rank's rows, [sizes[rank], ...].
      sizes: rows of every rank; the whole has their sum.
      rank: the rank that holds ``local``.

    Attributes:
      source: what has read it, where it can be read again: iterator, number of the batch, number of the leaf.
    """

    __slots__ = ("__weakref__", "_key", "local", "rank", "shape", "sizes", "source")

    def __init__(self, local: tf.Tensor, sizes: tuple[int, ...], rank: int) -> None:
        dims = local.shape.as_list()
        if dims[0] != sizes[rank]:
            raise ProgramError(
                "a rank's part of a batch has another number of rows than its share",
                given=f"{dims[0]} rows on rank {rank}",
                expected=f"{sizes[rank]} rows, of the shares {list(sizes)}",
                action="give every rank the rows of its share",
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
        """Returns a key that distinguishes it from tensors and parts of other shapes, in place of an eager tensor's
        shape.
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
            "a rank's part of a batch is used as a tensor",
            given=f"{self!r}, of which rank {self.rank} holds {self.sizes[self.rank]} rows",
            expected="an argument of a step of wh.function, which computes with the whole batch",
            action="move the computation into the step, or use `.local` for this rank's rows alone",
        )


# A comparison is one too; == and != stay those of objects, so that parts can be found in lists.
_OPERATORS = """add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge neg invert abs
radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor getitem len iter bool int float index"""
for _name in _OPERATORS.split():
    setattr(ShardedTensor, f"__{_name}__", ShardedTensor._refuse)


def is_iterator(value: Any) -> bool:
    """Tells whether ``value`` is an iterator outside of all graphs, of which a step can take batches."""
    if isinstance(value, iterator_ops.OwnedIterator):
        return isinstance(value._iterator_resource, tf.__internal__.EagerTensor)
    return bool(getattr(value, "_whale_iterator", False))


def read_inside(iterator: Any) -> ProgramError:
    """Returns the error for a step that reads an iterator where no batch can be drawn for it: in a loop, branch or
    function.
    """
    return ProgramError(
        "a step reads an iterator inside a loop, a branch or a function",
        given=repr(iterator),
        expected="a batch that is an argument of the step, or next(iterator) outside of loops",
        action="read the batch in front of the loop, or loop in Python and call the step for each batch",
    )


class IteratorReads:
    """The batches that a step takes from iterators while it is traced, as inputs of its program.

    Inside a loop, a branch or a function of the step nothing is drawn for it: there an iterator is read as TensorFlow
    reads it, by every rank.

    Attributes:
      iterators: those that batches were taken of, in order.
      batches: the batches, each a structure of tensors or of parts of tensors.
      inputs: placeholders of their tensors.
      inside: whether an iterator was read inside a loop, a branch or a function.

    Args:
      draw: takes the next batch of an iterator.
      batches: those that were drawn before the trace.
    """

    def __init__(self, draw: Callable[[Any], Any], batches: Sequence[Any] = ()) -> None:
        self.iterators: list[Any] = []
        self.batches = list(batches)
        self.inputs: list[tf.Tensor] = []
        self.inside = False
        self._draw, self._graph = draw, None

    @property
    def tensors(self) -> list[Any]:
        """Returns the values of ``inputs``."""
        return [t for batch in self.batches for t in tf.nest.flatten(batch, expand_composites=True)]

    def repeat(self) -> IteratorReads:
        """Returns an IteratorReads for another trace of the same step with the same batches."""
        return IteratorReads(self._draw, self.batches)

    def enter(self) -> None:
        """Records the current graph as that of the step."""
        self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Redirects reads of iterators in the step's graph to ``take`` inside the context."""
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
        """Returns the next batch of an iterator: placeholders in the step's own graph; inside its loops, what ``usual``
        reads.

        Args:
          usual: reads it in the graph at hand; None: there is no such form.

        Raises:
          ProgramError: the step reads iterators both inside and outside of its loops.
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
        return tf.nest.pack_sequence_as(batch, made, expand_composites=True)
