"""Gives scripts for strategies datasets of global batches, of which each rank reads its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.tf_distribute.steps import refuse_taking
from whale.runtime.input.data import ShardedDataset
from whale.runtime.run.context import Context


class DistributedDataset(ShardedDataset):
    """A dataset as ``wh.shard`` makes it, for loops as scripts for strategies write them.

    Raises:
      ProgramError: it is no tf.data.Dataset.
    """

    def __init__(self, dataset: Any, context: Context) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise ProgramError(
                "a strategy distributes datasets of tf.data",
                given=type(dataset).__name__,
                expected="a tf.data.Dataset of global batches",
                action="make one with tf.data.Dataset.from_generator or from_tensor_slices, and batch it",
            )
        super().__init__(dataset, context, "row")

    def __iter__(self) -> Any:
        refuse_taking("iter() of a distributed dataset")
        return DistributedIterator(super().__iter__(), self.element_spec)


class DistributedIterator:
    """The batches of one pass; a tf.function that takes them itself runs in Python, and its steps as they are."""

    def __init__(self, batches: Iterator[Any], element_spec: Any) -> None:
        self._batches = batches
        self.element_spec = element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        refuse_taking("next() of a distributed dataset's iterator")
        return next(self._batches)

    def get_next(self) -> Any:
        """Returns the next batch; raises tf.errors.OutOfRangeError at the end."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> Any:
        """Refuses: what a graph asks an optional for, Python says by StopIteration."""
        raise ProgramError(
            "batches are taken in Python",
            given="get_next_as_optional()",
            expected="next() until StopIteration, or a `for` loop",
            action="loop over the distributed dataset",
        )
