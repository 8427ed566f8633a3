"""Where in a dataset of ``wh.shard`` a loop is, as part of a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import Trackable

from whale.capture.sharded import ShardedTensor, drawing
from whale.errors import ProgramError
from whale.runtime.elastic.rows import ALONE

_KEY = "position"


@dataclass
class Epochs:
    """What the iterations over one dataset share.

    Attributes:
      elements: from how many of its first batches are left out to an iterator.
      begin: begins an iteration over the dataset and leaves it: a shuffle that reshuffles goes on to its next order.
      make_again: makes the dataset anew, so that its shuffle begins with its first order.
      reshuffles: each iteration has another order.
      reproducible: "" or why another run would see other samples.
      parts: number of ranks that make batches of their own files; 0 where the batches are those of one device.
      cut: this rank's part of a whole batch, where every rank reads all of them; None: it reads its part.
      may_grow: whether this rank is alone for the moment.
      begun: iterations so far.
      opened: how many of them the dataset itself knows of: those since the ranks have divided it.
      iterators: those that may go on.
    """

    elements: Callable[[int], Iterator[Any]]
    begin: Callable[[], object]
    make_again: Callable[[], object]
    reshuffles: bool
    reproducible: str
    parts: int
    cut: Callable[[Any], Any] | None = None
    may_grow: bool = False
    begun: int = 0
    opened: int = 0
    iterators: weakref.WeakSet[ShardedIterator] = field(default_factory=weakref.WeakSet)

    def open_again(self) -> None:
        """Iterations go on in a dataset that was made anew, so that any of its orders can be had."""
        self.make_again()
        self.opened = 0
        for iterator in self.iterators:
            iterator.go_back()

    def divided_again(self) -> None:
        """Ranks are gone. Where each reads its rows, the dataset is another one now, and iterations go on in it."""
        if self.cut is None:
            self.opened = 0
        for iterator in self.iterators:
            iterator.divided_again()


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
        self._elements: Iterator[Any] | None = None
        self._again: dict[int, list[Any]] = {}  # leaves of batches that were divided again, by number
        self._wholes: dict[int, Any] = {}  # the latest two batches, where every rank reads all of them

    def __iter__(self) -> ShardedIterator:
        return self

    def __next__(self) -> Any:
        step = None if tf.executing_eagerly() else drawing.get()
        return self.read() if step is None else step.take(self)

    def read(self) -> Any:
        """The next batch; StopIteration where there is none."""
        self.begin()
        element = next(self._elements)  # type: ignore[arg-type]
        if self._epochs.cut is not None:
            self._wholes = {n: whole for n, whole in self._wholes.items() if n == self._position - 1}
            self._wholes[self._position], element = element, self._epochs.cut(element)
        self._position += 1
        return self._marked(element, self._position - 1)

    def read_again(self, position: int) -> list[Any]:
        """The leaves of the batch of this number, as it is divided now. It was one of the latest two.

        What is read next stays the same.
        """
        if position not in self._again:
            if self._epochs.cut is not None:
                element = self._marked(self._epochs.cut(self._wholes[position]), position)
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
        if self._epochs.reshuffles and self._number is not None and self._epochs.opened > self._number:
            self._epochs.open_again()
        self.go_back(position)

    def _marked(self, element: Any, position: int) -> Any:
        """The batch of this number, whose parts say where they are from."""
        for leaf, part in enumerate(tf.nest.flatten(element)):
            if type(part) is ShardedTensor:
                part.source = self, position, leaf
            elif self._epochs.may_grow and isinstance(part, tf.Tensor):  # this rank is alone, and may not stay so
                setattr(part, ALONE, (weakref.ref(self), position, leaf))
        return element

    def divided_again(self) -> None:
        """The ranks are others now."""
        self._again = {}
        if self._epochs.cut is None:
            self.go_back()

    def go_back(self, position: int | None = None) -> None:
        """The next batch is read anew: that of this number, or the one that would be next."""
        self._position = self._position if position is None else position
        self._elements = None

    @property
    def place(self) -> tuple[int, int]:
        """(how many batches it has yielded, which iteration over the dataset it is)."""
        return self._position, self._epochs.begun if self._number is None else self._number

    def go_to(self, place: tuple[int, int]) -> None:
        """It goes on where another iterator over the same dataset was."""
        (self._position, self._number), self._elements = place, None

    def begin(self) -> None:
        """Begins now, if it has not: a shuffle that reshuffles goes on to its next order."""
        if self._elements is not None:
            return
        epochs = self._epochs
        if epochs.reshuffles:
            if self._number is None:
                self._number = epochs.begun
            if epochs.opened > self._number:
                raise ProgramError(
                    "an iterator cannot go back to an earlier order of its shuffle",
                    given=f"iteration {self._number + 1} of the dataset, of which {epochs.opened} were begun",
                    expected="a dataset of which no later iteration was begun",
                    action="make the dataset and wh.shard of it again before restoring",
                )
            for _ in range(self._number - epochs.opened):
                epochs.begin()
            epochs.opened, epochs.begun = self._number + 1, max(epochs.begun, self._number + 1)
        else:
            if self._number is None:
                self._number = epochs.begun
            epochs.begun += 1
        self._elements = epochs.elements(self._position)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if self._epochs.reproducible:
            raise ProgramError(
                "the position in a dataset cannot be saved",
                given=self._epochs.reproducible,
                expected="a dataset that another run reads in the same order",
                action="give its shuffle a seed, or leave the iterator out of the checkpoint",
            )
        return {_KEY: tf.constant([*self.place, self._epochs.parts], tf.int64)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> dict[str, Any]:
        position, number, parts = map(int, restored[_KEY].numpy())
        if parts != self._epochs.parts:
            raise ProgramError(
                "the position in a dataset is that of another number of ranks",
                given=f"saved with {parts or 'any number of'} parts of its files",
                expected=f"{self._epochs.parts or 'any number of'} parts",
                action='start as many ranks, or share out rows: wh.shard(dataset, by="row")',
            )
        self.go_to((position, number))
        return {}
