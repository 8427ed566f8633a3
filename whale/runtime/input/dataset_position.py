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
    """What the iterations over one dataset share.

    Attributes:
      elements: from how many of its first batches are left out to an iterator.
      begin: begins an iteration over the dataset and leaves it: a shuffle that reshuffles goes on to its next order.
      orders: of its shuffles.
      reshuffles: each iteration has another order.
      reproducible: "" or why another run would see other samples.
      element_spec: the structure of a whole batch.
      parts: number of ranks that make batches of their own files; 0 where the batches are those of one device.
      cut: this rank's part of a whole batch, where every rank reads all of them; None: it reads its part.
      may_grow: whether this rank is alone for the moment.
      begun: iterations so far.
      has_ended: whether one of them has come to its end, so that caches are full.
      iterators: those that may go on.
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
        """The ranks are others now. Where each reads its rows, iterations go on in a dataset that was made anew."""
        for iterator in self.iterators:
            iterator.divide_again()


# Where a loop is: batches yielded, the number of the iteration, and how many seeds the dataset's shuffles had drawn
# when the iteration began, and have now. None: the iteration has not begun, or nobody knows.
Place = tuple[int, int, tuple[int, ...] | None, tuple[int, ...] | None]


class ShardedIterator(Trackable):
    """Iterates over a dataset of ``wh.shard``; in a tf.train.Checkpoint it saves and restores its position.

    The position is the number of batches that it has yielded, so that it holds for any number of ranks (with
    ``by="file"`` for the same number). Restoring reads what lies before it once more.
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
        """The structure of a whole batch."""
        return self._epochs.element_spec

    def __next__(self) -> Any:
        step = None if tf.executing_eagerly() else drawing.get()
        return self.read() if step is None else step.take(self)

    def read(self) -> Any:
        """The next batch; StopIteration where there is none."""
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
        """The leaves of the batch of this number, as it is divided now. It was one of the latest two.

        What is read next stays the same.
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
        """The next batch is that of this number of the same order, also if the dataset has gone on to a later one."""
        self.go_back(position)

    def _mark(self, element: Any, position: int) -> Any:
        """The batch of this number, whose parts say where they are from."""
        for leaf, part in enumerate(tf.nest.flatten(element)):
            if type(part) is ShardedTensor:
                part.source = self, position, leaf
            elif self._epochs.may_grow and isinstance(part, tf.Tensor):  # this rank is alone, and may not stay so
                setattr(part, ALONE, (weakref.ref(self), position, leaf))
        return element

    def divide_again(self) -> None:
        """The ranks are others now."""
        self._again = {}
        if self._epochs.cut is None:
            self.go_back()

    def go_back(self, position: int | None = None) -> None:
        """The next batch is read anew: that of this number, or the one that would be next."""
        self._position = self._position if position is None else position
        self._elements = None

    @property
    def place(self) -> Place:
        """Where it is, also for another process."""
        number = self._epochs.begun if self._number is None else self._number
        return self._position, number, self._drawn, None if self._drawn is None else self._epochs.orders.now()

    def go_to(self, place: Place) -> None:
        """It goes on where another iterator over the same dataset was."""
        self._position, self._number, drawn, later = place
        self._drawn = self._later = None
        if drawn is not None and later is not None:
            self._drawn, self._later = tuple(drawn), tuple(later)
        self._elements, self._has_begun = None, False

    def begin(self) -> None:
        """Begins now, if it has not: a shuffle that reshuffles goes on to its next order."""
        if self._elements is not None:
            return
        epochs = self._epochs
        if self._number is None:
            self._number = epochs.begun
        if self._drawn is not None:  # it begins once more, or has begun in another process
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
        """Raises ProgramError where the order that it had, or is to have, is gone."""
        assert self._number is not None
        if self._epochs.reshuffles and (self._has_begun or self._epochs.begun > self._number):
            raise ProgramError(
                "an iterator cannot go back to an earlier order of its shuffle",
                given=f"iteration {self._number + 1} of the dataset, of which {self._epochs.begun} were begun",
                expected="a dataset of which no later iteration was begun",
                action="make the dataset and wh.shard of it again before restoring",
            )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if self._epochs.reproducible:
            raise ProgramError(
                "the position in a dataset cannot be saved",
                given=self._epochs.reproducible,
                expected="a dataset that another run reads in the same order",
                action="give its shuffle a seed, or leave the iterator out of the checkpoint",
            )
        position, number, drawn, now = self.place
        return {_KEY: tf.constant([position, number, self._epochs.parts, *(drawn or ()), *(now or ())], tf.int64)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> dict[str, Any]:
        position, number, parts, *seeds = map(int, restored[_KEY].numpy())
        if parts != self._epochs.parts:
            raise ProgramError(
                "the position in a dataset is that of another number of ranks",
                given=f"saved with {parts or 'any number of'} parts of its files",
                expected=f"{self._epochs.parts or 'any number of'} parts",
                action='start as many ranks, or share out rows: wh.shard(dataset, by="row")',
            )
        drawn, now = tuple(seeds[: len(seeds) // 2]), tuple(seeds[len(seeds) // 2 :])
        self.go_to((position, number, drawn or None, now or None))
        return {}
