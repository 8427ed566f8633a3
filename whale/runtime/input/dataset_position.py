"""Saves and restores the position of a loop in a dataset of ``wh.shard``, as part of a checkpoint.

Decision: 0138.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import Trackable

from whale.capture.sharded import ShardedTensor, drawing
from whale.errors import ProgramError
from whale.runtime.elastic.call_replay import ALONE
from whale.runtime.input.shuffle_orders import Orders

_KEY = "position"


@dataclass
class Epochs:
    """Holds what the iterations over one dataset of ``wh.shard`` share; each ``ShardedIterator`` refers to it.

    Attributes:
      elements: takes a number of batches to skip; returns an iterator over the rest.
      begin: begins an iteration and drops it, so that a shuffle that reshuffles proceeds to its next order.
      orders: tracks and sets the orders of the dataset's shuffles.
      reshuffles: whether each iteration has another order.
      reproducible: the reason why another run would see other samples; "": it would see the same.
      element_spec: the structure and types of a whole batch.
      parts: number of ranks that make batches of their own files; 0 if batches are those of one device.
      cut: returns this rank's part of a whole batch, if every rank reads whole batches; None: this rank reads only its
        part.
      may_grow: whether this rank is the only one at present, but others may join.
      begun: number of iterations begun so far.
      has_ended: whether an iteration has come to its end, so that caches are full.
      iterators: those that still exist, and may continue.
    """

    elements: Callable[[int], Iterator[Any]]
    begin: Callable[[], object]
    orders: Orders
    reshuffles: bool
    reproducible: str
    element_spec: Any
    parts: int
    cut: Callable[[Any], Any] | None = None
    may_grow: bool = False
    begun: int = 0
    has_ended: bool = False
    iterators: weakref.WeakSet[ShardedIterator] = field(default_factory=weakref.WeakSet)

    def divide_again(self) -> None:
        """Makes the open iterations continue with this rank's rows under the new division of the ranks."""
        for iterator in self.iterators:
            iterator.divide_again()


# Where a loop is: batches yielded, the number of the iteration, and how many seeds the dataset's shuffles had drawn
# when the iteration began, and have now. None: the iteration has not begun, or nobody knows.
Place = tuple[int, int, tuple[int, ...] | None, tuple[int, ...] | None]


class ShardedIterator(Trackable):
    """Iterates over a dataset of ``wh.shard``; in a tf.train.Checkpoint it saves and restores its position.

    The position is the number of batches yielded, which is valid for any number of ranks (with ``by="file"``, for the
    same number only). Restoring reads the batches before it once more.
    """

    _whale_iterator = True  # a step reads batches of it

    def __init__(self, epochs: Epochs) -> None:
        self._epochs, self._position = epochs, 0
        epochs.iterators.add(self)
        self._number: int | None = None  # of the iteration; known when it begins
        self._drawn: tuple[int, ...] | None = None  # seeds, when it began
        self._later: tuple[int, ...] | None = None  # seeds, when another process was here
        self._has_begun = False
        self._elements: Iterator[Any] | None = None
        self._again: dict[int, list[Any]] = {}  # leaves of batches that were divided again, by number
        self._wholes: dict[int, Any] = {}  # the latest two batches, where every rank reads all of them

    def __iter__(self) -> ShardedIterator:
        return self

    @property
    def element_spec(self) -> Any:
        """Returns the structure and types of a whole batch."""
        return self._epochs.element_spec

    def __next__(self) -> Any:
        step = None if tf.executing_eagerly() else drawing.get()
        return self.read() if step is None else step.take(self)

    def read(self) -> Any:
        """Returns the next batch, or this rank's part of it; raises StopIteration if there is none."""
        self.begin()
        try:
            element = next(self._elements)  # type: ignore[arg-type]
        except StopIteration:
            self._epochs.has_ended = True
            raise
        if self._epochs.cut is not None:
            self._wholes = {n: whole for n, whole in self._wholes.items() if n == self._position - 1}
            self._wholes[self._position], element = element, self._epochs.cut(element)
        self._position += 1
        return self._mark(element, self._position - 1)

    def read_again(self, position: int) -> list[Any]:
        """Returns the flat tensors of batch number ``position``, one of the latest two, as it is divided among the
        ranks now.

        The batch that is read next stays the same.
        """
        if position not in self._again:
            if self._epochs.cut is not None:
                element = self._mark(self._epochs.cut(self._wholes[position]), position)
            else:
                behind = self._position
                self._read_from(position)
                element = self.read()
                if self._position != behind:
                    self._read_from(behind)
            self._again[position] = tf.nest.flatten(element)
        return self._again[position]

    def _read_from(self, position: int) -> None:
        """Makes batch number ``position`` of this iteration the next one. The iteration keeps its order, even if the
        dataset's shuffle has proceeded to the order of a later iteration.
        """
        self.go_back(position)

    def _mark(self, element: Any, position: int) -> Any:
        """Returns the batch, with its source (iterator, number of the batch, index of the tensor) noted in those of its
        tensors that are parts of the batch, so that ``cut_rows_again`` can read them again. On a rank that is alone,
        but may be joined by others, whole tensors carry the note too.
        """
        for leaf, part in enumerate(tf.nest.flatten(element)):
            if type(part) is ShardedTensor:
                part.source = self, position, leaf
            elif self._epochs.may_grow and isinstance(part, tf.Tensor):  # this rank is alone, and may not stay so
                setattr(part, ALONE, (weakref.ref(self), position, leaf))
        return element

    def divide_again(self) -> None:
        """Drops batches that were cut for earlier ranks, so that reading continues with this rank's present rows."""
        self._again = {}
        if self._epochs.cut is None:
            self.go_back()

    def go_back(self, position: int | None = None) -> None:
        """Makes the iterator read anew from batch number ``position``; None: from the present position."""
        self._position = self._position if position is None else position
        self._elements = None

    @property
    def place(self) -> Place:
        """Returns the position in a form that another process can continue from (``go_to``)."""
        number = self._epochs.begun if self._number is None else self._number
        return self._position, number, self._drawn, None if self._drawn is None else self._epochs.orders.now()

    def go_to(self, place: Place) -> None:
        """Makes the iterator continue where another iterator over the same dataset was; takes its ``place``."""
        self._position, self._number, drawn, later = place
        self._drawn = self._later = None
        if drawn is not None and later is not None:
            self._drawn, self._later = tuple(drawn), tuple(later)
        self._elements, self._has_begun = None, False

    def begin(self) -> None:
        """Begins the iteration, unless it has begun: a shuffle that reshuffles proceeds to its next order.

        Raises:
          ProgramError: the order that it must have is gone, because the dataset has proceeded to a later one.
        """
        if self._elements is not None:
            return
        epochs = self._epochs
        if self._number is None:
            self._number = epochs.begun
        if self._drawn is not None:  # it has begun before, here or in another process
            self._elements = epochs.orders.begin_at(self._drawn, self._later, lambda: epochs.elements(self._position))
        else:
            self._refuse_earlier()
            for _ in range(self._number - epochs.begun if epochs.reshuffles else 0):
                epochs.begin()
            self._drawn = epochs.orders.now()
            self._elements = epochs.elements(self._position)
        self._later, self._has_begun = None, True
        epochs.begun = max(epochs.begun, self._number + 1)

    def _refuse_earlier(self) -> None:
        """Raises ProgramError if the shuffle has already proceeded beyond the order of this iteration."""
        assert self._number is not None
        if self._epochs.reshuffles and (self._has_begun or self._epochs.begun > self._number):
            raise ProgramError(
                "an iterator cannot go back to an earlier order of its shuffle",
                given=f"iteration {self._number + 1} of the dataset, of which {self._epochs.begun} were begun",
                expected="a dataset of which no later iteration was begun",
                action="create the dataset, and wh.shard(dataset), anew before restoring",
            )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if self._epochs.reproducible:
            raise ProgramError(
                "the position in a dataset cannot be saved",
                given=self._epochs.reproducible,
                expected="a dataset that another run reads in the same order",
                action="give its shuffle a seed, or leave the iterator out of the checkpoint",
            )
        if unknown := self._epochs.orders.find_unknown_fill():
            raise ProgramError(
                "the position in a dataset cannot be saved",
                given=unknown,
                expected="a cache that an iteration by itself has read to its end",
                action="read the dataset once to its end before it is read twice at once (zip, sample_from_datasets), "
                "put cache in front of shuffle, or leave the iterator out of the checkpoint",
            )
        position, number, drawn, now = self.place
        return {_KEY: tf.constant([position, number, self._epochs.parts, *(drawn or ()), *(now or ())], tf.int64)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> dict[str, Any]:
        position, number, parts, *seeds = map(int, restored[_KEY].numpy())
        if parts != self._epochs.parts:
            raise ProgramError(
                "the saved position in a dataset is for another number of ranks",
                given=f"saved with {parts or 'any number of'} parts of its files",
                expected=f"{self._epochs.parts or 'any number of'} parts",
                action='start as many ranks, or divide rows: wh.shard(dataset, by="row")',
            )
        drawn, now = tuple(seeds[: len(seeds) // 2]), tuple(seeds[len(seeds) // 2 :])
        self.go_to((position, number, drawn or None, now or None))
        return {}
