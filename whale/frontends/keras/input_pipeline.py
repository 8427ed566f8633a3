"""Makes each rank read its own rows of every batch from the data that a script passes to Keras.

If Keras shuffles arrays, all ranks use one seed (``common_seed``), so that they agree on the order of rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale.capture.packing import make_element_packer
from whale.capture.sharded import ShardedTensor
from whale.frontends.keras.steps import list_named_parts
from whale.ir.values import UNMOVABLE
from whale.runtime.context import Context, find_running
from whale.runtime.input.data import ShardedDataset, iterate_elements
from whale.runtime.input.dataset_position import ShardedIterator
from whale.runtime.input.dataset_rows import UNCHANGED
from whale.runtime.input.equal_datasets import describe_build
from whale.runtime.input.equal_inputs import refuse_other_values
from whale.runtime.input.local_batches import find_first_row, rows_of, take_rows

_INDICES_AHEAD = 64  # batches whose indices are read at once
_SMALL_BYTES = 256 << 10  # of a batch: copying its rows takes less time than a thread that reads ahead


def feed_dataset(
    dataset: Any, context: Context, of_script: bool, again: bool = False, agreed: bool = False
) -> FedDataset:
    """Returns an iterable over the batches of a dataset, as this rank passes them to the model's step.

    Args:
      dataset: a dataset of global batches; with ``batch.mode="local"``, of this rank's own batches.
      of_script: whether the script created the dataset, not Keras; then the cost of reading it is logged.
      again: whether Keras created it a second time from the same arrays, which were compared already.
      agreed: whether the other ranks created it before this process joined them.

    Raises:
      ProgramError: Keras created the dataset from arrays that differ between ranks.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return FedDataset(dataset, False, getattr(dataset, "element_spec", None))
    specs = [s for s in tf.nest.flatten(dataset.element_spec) if isinstance(s, tf.TensorSpec)]
    rows_vary = any(s.shape.rank is None or (s.shape.rank and s.shape[0] is None) for s in specs)
    batches: Any = dataset
    grows = context.elastic is not None and context.elastic.is_keeping_commits  # where in it a loop is has to be known
    divides = context.has_other_processes and not context.has_local_batch and not _needs_whole_batches(context)
    # In an elastic run the other ranks read the rows of a rank that is lost, so they have to know which these are.
    kept = of_script or context.elastic is not None
    found = None if kept else _find_array_batches(dataset, context, divides, again)
    if found is not None:
        batches = found
    elif grows or divides:
        batches = ShardedDataset(dataset, context, "row", of_script, agreed)
    return FedDataset(batches, rows_vary, dataset.element_spec)


@dataclass(frozen=True)
class FedDataset:
    """Represents the batches that a loop of Keras iterates over; an iteration begins when it is requested.

    Attributes:
      batches: a dataset, ShardedDataset, or other iterable.
      rows_vary: whether plain Keras would trace its step with an unknown batch size.
      element_spec: specs of the global batches; None for data without specs.
      place: called with each new iterator; may move it to a later batch.
    """

    batches: Any
    rows_vary: bool
    element_spec: Any = None
    place: Callable[[ShardedIterator], None] = lambda iterator: None

    def __iter__(self) -> FedIterator:
        elements = iter(self.batches)
        if isinstance(elements, ShardedIterator):
            self.place(elements)
            elements.begin()
        elif isinstance(self.batches, tf.data.Dataset):
            elements = iterate_elements(elements)
        return FedIterator(elements, self.rows_vary, self.element_spec)


@dataclass(frozen=True)
class FedIterator:
    """Represents one iteration over a ``FedDataset``.

    Attributes:
      elements: the iterator over batches.
      rows_vary: as in ``FedDataset``.
      element_spec: as in ``FedDataset``; Keras' own iterators have it, too.
    """

    elements: Iterator[Any]
    rows_vary: bool
    element_spec: Any  # of the batches, as plain Keras' iterator has it

    def __iter__(self) -> FedIterator:
        return self

    def __next__(self) -> Any:
        return next(self.elements)


def _needs_whole_batches(context: Context) -> bool:
    """Returns True if each rank has to read whole batches, since a plan may divide them other than by ranks.

    This is the case with stages and with ``mesh.auto_parallel``.
    """
    saved = context.planning.saved is not None and context.planning.saved.needs_whole_batches
    return saved or context.scoping.stages_seen or bool(context.config["mesh.auto_parallel"])


def find_whole_dataset(data: Any) -> Any:
    """Returns the dataset of global batches that was passed to ``wh.shard``; other data are returned unchanged."""
    return data.whole if isinstance(data, ShardedDataset) else data


@dataclass(frozen=True)
class _ArrayBatches:
    """Represents the batches of a dataset that Keras made of arrays, as this rank passes them to the model's step.

    NumPy takes the rows of small batches from the arrays when the loop requests them. Threads of tf.data that read
    ahead would take the cores and Python's lock from the step for longer than that lasts.

    Decision: 0226.

    Attributes:
      whole: the dataset of global batches.
      indices: the dataset of the indices of each global batch's rows, [rows].
      arrays: the dataset that yields the arrays, without end.
      takes: Keras' function from (indices, arrays) to a batch.
      of_rank: whether batches are this rank's rows only, as ShardedTensors, rather than whole batches.
    """

    whole: tf.data.Dataset
    indices: tf.data.Dataset
    arrays: tf.data.Dataset
    takes: Callable[[tf.Tensor, Any], Any]
    context: Context
    of_rank: bool

    def __iter__(self) -> Iterator[Any]:
        options = tf.data.Options().merge(self.whole.options())
        options.autotune.enabled = False  # see `ShardedDataset`
        chunks = iter(self.indices.ragged_batch(_INDICES_AHEAD).with_options(options))
        first = next(chunks, None)
        if first is None:
            return iter(())
        arrays = tf.nest.flatten(next(iter(self.arrays)))
        begin, end, _ = self._find_own(int(first[0].shape[0]))
        row_bytes = sum(array.dtype.size * math.prod(array.shape[1:]) for array in arrays)
        if (end - begin) * row_bytes <= _SMALL_BYTES:
            return self._take_rows(list(map(np.asarray, arrays)), itertools.chain((first,), chunks))
        return self._read_ahead() if self.of_rank else iterate_elements(iter(self.whole))

    def _find_own(self, rows: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns where this rank's rows begin and end in a batch of so many rows, and the rows of all ranks."""
        if not self.of_rank:
            return 0, rows, ()
        sizes = rows_of(rows, self.context)
        first = find_first_row(sizes, self.context)
        return first, first + sizes[self.context.rank], sizes

    def _take_rows(self, arrays: Sequence[np.ndarray], chunks: Iterable[tf.Tensor | tf.RaggedTensor]) -> Iterator[Any]:
        """Yields the batches of rows whose indices are in ``chunks``, [batches, rows]."""
        pack, rank = make_element_packer(self.whole.element_spec), self.context.rank
        for indices in itertools.chain.from_iterable(map(_list_rows, chunks)):
            begin, end, sizes = self._find_own(len(indices))
            own = indices[begin:end]
            taken = [take_rows(array, own) for array in arrays]
            parts = [ShardedTensor(t, sizes, rank) for t in taken] if self.of_rank else taken
            yield pack(parts)

    def _read_ahead(self) -> Iterator[Any]:
        """Yields this rank's rows of batches, which tf.data reads ahead of the loop."""
        context = self.context

        def find_bounds(rows: np.ndarray) -> np.ndarray:
            return np.array(self._find_own(int(rows))[:2], np.int64)

        def cut_own(indices: tf.Tensor, arrays: Any) -> Any:
            rows = tf.size(indices)
            bounds = tf.numpy_function(find_bounds, [rows], tf.int64, stateful=False)
            begin, end = tf.unstack(tf.ensure_shape(bounds, (2,)))
            return rows, self.takes(indices[begin:end], arrays)

        own = tf.data.Dataset.zip((self.indices, self.arrays)).map(cut_own, num_parallel_calls=tf.data.AUTOTUNE)
        for rows, batch in own.with_options(self.whole.options()).prefetch(tf.data.AUTOTUNE):
            sizes = rows_of(int(rows), context)
            yield tf.nest.map_structure(functools.partial(ShardedTensor, sizes=sizes, rank=context.rank), batch)


def _list_rows(chunk: tf.Tensor | tf.RaggedTensor) -> list[np.ndarray]:
    """Returns the rows of a matrix, which may have different lengths."""
    if isinstance(chunk, tf.RaggedTensor):
        return np.split(chunk.values.numpy(), chunk.row_splits.numpy()[1:-1])
    return list(chunk.numpy())


def _find_array_batches(dataset: Any, context: Context, of_rank: bool, again: bool) -> _ArrayBatches | None:
    """Returns the batches of a dataset that Keras made of arrays; None for other datasets.

    Keras zips a dataset of row indices with the arrays, and gathers the rows in a map function.

    Args:
      dataset: the dataset that Keras made.
      context: the run.
      of_rank: whether this rank reads only its own rows.
      again: True if the arrays were compared between the ranks already, when Keras first made a dataset of them.
    """
    whole = dataset
    while type(dataset).__name__ in UNCHANGED:
        dataset = dataset._input_dataset
    takes: Any = getattr(getattr(dataset, "_map_func", None), "_func", None)
    if getattr(takes, "__name__", "") != "grab_batch" or type(dataset._input_dataset).__name__ != "_ZipDataset":
        return None
    indices, arrays = dataset._input_dataset._datasets
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.rank and s.dtype.name not in UNMOVABLE for s in specs):
        return None
    if of_rank and context.config["debug.check_inputs"] and not again:
        given = dict(list_named_parts(next(iter(arrays))))
        order = {f"the order of rows ({what})": value for what, value in describe_build(indices).items()}
        refuse_other_values(given | order, context, "fit, evaluate or predict", "these arrays")
    return _ArrayBatches(whole, indices, arrays, takes, context, of_rank)


@contextmanager
def common_seed() -> Iterator[None]:
    """Sets TensorFlow's global seed, inside of the context, to a seed that rank 0 has drawn, unless the script has set
    one.

    Random ops without a seed, such as Keras' shuffle, then draw the same on every rank. Does nothing if there is only
    one process. Not collective.
    """
    context = find_running()
    if context is None or context.seeds is None:
        yield
        return
    with context.seeds.set_global_seed():
        yield
