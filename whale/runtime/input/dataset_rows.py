"""Builds, from a tf.data dataset of global batches, a dataset in which one rank reads only its rows of every batch.

A dataset ``source -> shuffle, repeat, map ... -> batch(n) -> repeat, take, zip ...`` is built again with a selection of
samples by their position in the batch. Maps that compute each sample by itself move behind the selection, across
shuffles, repeats and zips too, so that a rank transforms only its own samples. Transformations after batch(n) that move
whole batches are applied to the rank's parts of these batches in the same way. Any other transformation stays in front
of the selection, or is a reason to read all rows (``Unknown``). In every case the batches are those of one device.

Decision: 0024.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops.directed_interleave_op import _DirectedInterleaveDataset
from tensorflow.python.data.util import nest
from tensorflow.python.framework import op_def_registry

from whale.distributed.common_seeds import IN_ORDER
from whale.errors import ProgramError
from whale.ir.ops import CALLS, DRAWS, HAS_BODIES
from whale.ir.values import UNMOVABLE
from whale.runtime.input.equal_datasets import Summary, is_seen, summary_of
from whale.runtime.input.shuffle_orders import (
    Seeds,
    common_order,
    generator_of,
    is_reshuffled,
    keeps_orders,
    read_graph,
    reshuffles,
    restarts,
    shuffle_as,
    upstream,
)

Shares = Callable[[int], tuple[int, ...]]
Sample = Any  # a structure of tensors

UNCHANGED = ("_PrefetchDataset", "_OptionsDataset")
# Transformations that move samples without reading their values.
_MOVES = ("_ShuffleDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset", "_ShardDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
# Ops that TensorFlow declares stateful, but that give equal outputs for equal inputs.
_REPEATS = HAS_BODIES | CALLS | {"Assert", "LookupTableFindV2", "LookupTableSizeV2"}
_NO_SUMMARY = -1
_NOT_SO_EARLY = "make the dataset after wh.init(), which gives it an order, or leave deterministic=False out"
_BATCH_LAST = "put batch(n) last: behind it, every transformation is one of whole batches"
# Transformations whose batches cannot be divided: class name -> (name in scripts, what the user can do).
_NEXT_STEPS = {
    "Map": ("map", "put map in front of batch(n), where each rank computes its samples only"),
    "FlatMap": ("flat_map", "have the function give samples, and put batch(n) behind flat_map"),
    "Interleave": ("interleave", "have the function give samples, and put batch(n) behind interleave"),
    "GroupByWindow": (
        "group_by_window or bucket_by_sequence_length",
        "compute what is costly in the step, where each rank has its rows, instead of in maps",
    ),
    "Unbatch": ("unbatch", "put batch(n) behind unbatch"),
    "Filter": ("filter", "put filter in front of batch(n)"),
    "TensorSlice": ("from_tensor_slices", "make it of samples, and put batch(n) behind it"),
    "Generator": ("from_generator", "have the generator yield samples, and put batch(n) behind it"),
}
# Types of which a rank cannot take rows: (spec, name for messages, what the user can do).
_WITHOUT_ROWS: tuple[tuple[Any, str, str], ...] = (
    (
        tf.RaggedTensorSpec,
        "ragged tensors (ragged_batch, or a map that makes them)",
        "make them dense: padded_batch(n, padded_shapes=...), or .to_tensor(shape=...) in a map in front of batch(n)",
    ),
    (tf.SparseTensorSpec, "sparse tensors", "make them dense: tf.sparse.to_dense in a map in front of batch(n)"),
)


class Unknown(Exception):
    """Raised if a rank has to read all rows of a dataset instead of its own, with the reason and what the user can
    change.
    """

    def __init__(self, reason: str, action: str = "") -> None:
        super().__init__(f"{reason}; {action}" if action else reason)


@dataclass(frozen=True)
class Part:
    """Holds this rank's rows of one global batch.

    Attributes:
      leaves: the flat tensors, with at least one row; only the first ``shares(rows)[rank]`` rows are this rank's.
      rows: number of rows of the global batch.
      met: for each ``Summary`` (recorder of values to be compared between ranks) that has seen the batch: the summary,
        the batch's number within its repetition, and the index in ``leaves`` of the first tensor of its dataset.
    """

    leaves: list[tf.Tensor]
    rows: int
    met: tuple[tuple[Summary, int, int], ...]


@dataclass(frozen=True)
class Sizes:
    """Describes how many rows the batches of a dataset have, as far as known without reading it.

    Attributes:
      every: rows of each batch; 0: batches may differ.
      described: how the batches come about (``("batch", 32, ...)``, then transformations). If it is equal for two
        datasets, their batches have the same rows, batch by batch, so that they can be zipped; None: unknown.
    """

    every: int
    described: tuple[Any, ...] | None

    def follow(self, *transformation: Any) -> Sizes:
        """Returns the sizes of a dataset that is made from this one by a transformation that keeps or leaves out whole
        batches.

        Args:
          transformation: its name and numbers, such as ``"repeat", 3``.
        """
        return Sizes(self.every, None if self.described is None else (*transformation, self.described))


@dataclass(frozen=True)
class OwnRows:
    """Represents a rank's part of a dataset.

    Attributes:
      dataset: yields an element for each global batch, which ``part`` decodes.
      leaves: number of tensors in a batch, for each dataset that is zipped.
      sizes: rows of the global batches.
      moved: number of maps that run on this rank's samples only.
      kept: names of maps that run on all samples.
      reseeded: shuffles of the dataset that had no seed, and got one that is equal on all ranks.
      summaries: recorders of batches that must be compared between ranks, because how the dataset is built does not
        show whether all ranks read the same ones.
      reads_ahead: whether batches are read ahead within each repetition.
    """

    dataset: tf.data.Dataset
    leaves: tuple[int, ...]
    sizes: Sizes
    moved: int
    kept: tuple[str, ...]
    reseeded: tuple[Any, ...]
    summaries: tuple[Summary, ...]
    reads_ahead: bool = False

    def part(self, element: Any) -> Part:
        """Decodes an element of ``dataset``: this rank's tensors, the number of rows of the global batch, and what was
        recorded of it.
        """
        flat, leaves, rows, met = tf.nest.flatten(element), list[tf.Tensor](), 0, list[tuple[Summary, int, int]]()
        for count in self.leaves:
            own_rows, number, summary = map(int, flat[count].numpy()[0])
            if summary != _NO_SUMMARY:
                met.append((self.summaries[summary], number, len(leaves)))
            leaves += flat[:count]
            flat, rows = flat[count + 1 :], rows or own_rows
        return Part(leaves, rows, tuple(met))


def own_rows(
    dataset: tf.data.Dataset,
    shares: Shares,
    rank: int,
    first_row: Callable[[tuple[int, ...]], int],
    seeds: Seeds,
    ahead: int = 0,
    every: int = 0,
) -> OwnRows:
    """Returns a dataset that reads only the samples of ``rank``.

    Args:
      shares: takes the rows of a batch; returns the rows of every rank.
      first_row: takes the rows of every rank; returns where this rank's rows begin in the batch.
      seeds: returns a seed, equal on all ranks, for a shuffle that has none.
      ahead: number of batches to read ahead within a repetition, in datasets where reading into the next repetition
        would make a shuffle begin its next order.
      every: every how many batches one is compared between the ranks; 0: none.

    Raises:
      Unknown: the dataset's structure does not allow it.
    """
    division = _Division(shares, rank, first_row, seeds, ahead, every)
    made = division.divide(dataset)
    return replace(made, summaries=tuple(division.summaries))


class _Division:
    """Divides a dataset and all datasets that it is made from; the arguments are those of ``own_rows``.

    Attributes:
      summaries: of all parts divided so far.
    """

    def __init__(
        self,
        shares: Shares,
        rank: int,
        first_row: Callable[[tuple[int, ...]], int],
        seeds: Seeds,
        ahead: int,
        every: int,
    ) -> None:
        self._shares, self._rank, self._first_row, self._seeds = shares, rank, first_row, seeds
        self._ahead, self._every = ahead, every
        self.summaries: list[Summary] = []

    def divide(self, dataset: Any) -> OwnRows:
        """Returns this rank's part of a dataset of batches; raises Unknown if its last transformation cannot be
        divided.
        """
        kind = type(dataset).__name__
        if kind in UNCHANGED:
            return self.divide(dataset._input_dataset)
        if kind in _BATCHES or kind == "_PaddedBatchDataset":
            return self._divide_batches(dataset)
        if kind == "_RebatchDataset":
            return self._divide_again(dataset)
        if kind == "_ShuffleDataset":
            return self._divide_shuffled(dataset)
        if kind in _MOVES:
            return self._divide_moved(dataset)
        if kind == "CacheDataset":
            return self._divide_kept(dataset)
        if kind == "_ZipDataset":
            return self._divide_zipped(dataset)
        if kind == "_ConcatenateDataset":
            return self._divide_one_of(dataset, dataset._input_datasets, "concatenate")
        if kind == "_DirectedInterleaveDataset":
            what = "sample_from_datasets or choose_from_datasets"
            return self._divide_one_of(dataset, dataset._data_inputs, what)
        raise _ends_in(dataset)

    # -- what stands behind batch(n)

    def _divide_moved(self, made: Any) -> OwnRows:
        """Returns this rank's part of batches that are repeated, or of which some are left out (repeat, take, skip,
        shard).
        """
        inner = self.divide(made._input_dataset)
        if type(made).__name__ == "_RepeatDataset":
            # TensorFlow fuses a shuffle and a repeat that are adjacent, so nothing may be put in between.
            is_apart = type(made._input_dataset).__name__ != "_ShuffleDataset"
            begins_here = is_apart and restarts(made) and not restarts(made._input_dataset)
            reads_ahead = bool(self._ahead) and begins_here
            repeated = inner.dataset.prefetch(self._ahead) if reads_ahead else inner.dataset
            return replace(
                inner,
                dataset=repeated.repeat(made._count),
                sizes=inner.sizes.follow("repeat", _number(made._count)),
                reads_ahead=reads_ahead or inner.reads_ahead,
            )
        numbers = [_number(getattr(made, name)) for name in ("_count", "_num_shards", "_index") if hasattr(made, name)]
        sizes = inner.sizes.follow(type(made).__name__, *numbers)
        return replace(inner, dataset=_put_on(inner.dataset, made, self._seeds), sizes=sizes)

    def _divide_shuffled(self, made: Any) -> OwnRows:
        """Returns this rank's part of batches that are shuffled after batch(n). The rank's dataset has one element for
        each global batch, so the same shuffle brings its parts into the same order.
        """
        inner = self.divide(made._input_dataset)
        if self.summaries:
            raise Unknown(
                "the dataset shuffles batches that ranks compare in the order in which they are read", _BATCH_LAST
            )
        if is_reshuffled(made) and not _is_unseeded(made) and generator_of(made) is None:
            raise Unknown("the seed generator of the dataset's shuffle behind batch(n) cannot be read", _BATCH_LAST)
        sizes = Sizes(inner.sizes.every, None)
        reseeded = (*inner.reseeded, made) if _is_unseeded(made) else inner.reseeded
        return replace(inner, dataset=_put_on(inner.dataset, made, self._seeds), sizes=sizes, reseeded=reseeded)

    def _divide_kept(self, made: Any) -> OwnRows:
        """Returns this rank's part of batches that are cached in memory; each rank caches its own part."""
        source = made._input_dataset
        drawn = any(n.op in DRAWS for d in upstream(source) for graph in _graphs(d) for n in graph.values())
        if tf.get_static_value(made._filename) or reshuffles(source) or drawn or not is_seen(source):
            raise Unknown(
                "the dataset ends in cache, of batches that are in a file, shuffled, drawn or made by Python",
                "put cache in front of batch(n)",
            )
        inner = self.divide(source)
        return replace(inner, dataset=inner.dataset.cache())

    def _divide_zipped(self, made: Any) -> OwnRows:
        """Returns this rank's part of batches that are zipped; raises Unknown unless all of them have the same number
        of rows.
        """
        parts = [self.divide(one) for one in nest.flatten(made._datasets)]
        first = parts[0].sizes
        equal = all(p.sizes.every and p.sizes.every == first.every for p in parts)
        if not equal and not all(p.sizes == first and first.described is not None for p in parts):
            raise Unknown(
                "the dataset ends in zip, of batches that may have different numbers of rows",
                "zip the samples, and put batch(n) behind it; or shard each one: zip(wh.shard(a), wh.shard(b))",
            )
        return OwnRows(
            dataset=tf.data.Dataset.zip(tuple(p.dataset for p in parts)),
            leaves=tuple(count for p in parts for count in p.leaves),
            sizes=first if equal or len({p.sizes for p in parts}) == 1 else Sizes(first.every, None),
            moved=sum(p.moved for p in parts),
            kept=tuple(name for p in parts for name in p.kept),
            reseeded=tuple(one for p in parts for one in p.reseeded),
            summaries=(),
        )

    def _divide_one_of(self, made: Any, datasets: Sequence[Any], what: str) -> OwnRows:
        """Returns this rank's part of batches that come from several datasets, one after the other or by selection.

        Args:
          made: the dataset that combines them.
          datasets: those that it takes batches from.
          what: name of the transformation, for the reason if it cannot be divided.
        """
        parts = [self.divide(one) for one in datasets]
        first = parts[0]
        if any(p.leaves != first.leaves for p in parts):
            raise Unknown(
                f"the dataset ends in {what}, of batches of which some are zipped", f"put batch(n) behind {what}"
            )
        if type(made).__name__ == "_ConcatenateDataset":
            own = first.dataset.concatenate(parts[1].dataset)
            known = all(p.sizes.described is not None for p in parts)
            described = ("concatenate", *(p.sizes.described for p in parts)) if known else None
        else:
            own = _DirectedInterleaveDataset(
                made._selector_input, [p.dataset for p in parts], made._stop_on_empty_dataset
            )
            described = None
        every = first.sizes.every if len({p.sizes.every for p in parts}) == 1 else 0
        return replace(
            first,
            dataset=own,
            sizes=Sizes(every, described),
            moved=sum(p.moved for p in parts),
            kept=tuple(name for p in parts for name in p.kept),
            reseeded=tuple(one for p in parts for one in p.reseeded),
        )

    # -- batch(n)

    def _divide_again(self, rebatch: Any) -> OwnRows:
        """Returns this rank's part of a rebatched dataset (``rebatch(n)``), cut from the samples of the
        batches before.
        """
        size, drop = tf.get_static_value(rebatch._batch_sizes), bool(_number(rebatch._drop_remainder))
        if np.ndim(size):
            raise Unknown(
                "the dataset ends in rebatch with several sizes that take turns", "call rebatch(n) with one size"
            )
        inner = rebatch._input_dataset
        if type(inner).__name__ == "_RestructuredDataset":  # TensorFlow's own map, which changes no dense tensor
            inner = inner._input_dataset._input_dataset
        while type(inner).__name__ in UNCHANGED:
            inner = inner._input_dataset
        is_whole = type(inner).__name__ in _BATCHES and not _number(inner._drop_remainder)
        samples = inner._input_dataset if is_whole else inner.unbatch()
        return self._divide_samples(samples, _Batch(int(size), drop, rebatch.element_spec))

    def _divide_batches(self, batch: Any) -> OwnRows:
        parallel, pad = _parallel(batch), None
        if type(batch).__name__ == "_PaddedBatchDataset":
            pad = batch._padded_shapes, batch._padding_values
            if any(np.min(tf.get_static_value(s), initial=0) < 0 for s in nest.flatten(batch._padded_shapes)):
                raise Unknown(
                    "the dataset ends in padded_batch, which pads rows to the longest one of the whole batch",
                    "give it padded_shapes without None",
                )
        size, drop = _number(batch._batch_size), bool(_number(batch._drop_remainder))
        return self._divide_samples(batch._input_dataset, _Batch(size, drop, batch.element_spec, parallel, pad))

    def _divide_samples(self, samples: Any, batch: _Batch) -> OwnRows:
        """Returns this rank's samples of each batch, in batches, from the dataset of samples in front of batch(n)."""
        size, usual = batch.size, self._shares(batch.size)[self._rank]
        if not usual and not all(s.shape[1:].is_fully_defined() for s in tf.nest.flatten(batch.element_spec)):
            raise Unknown("a rank has no rows of any batch, and does not know their shapes without reading them")
        count = int(samples.cardinality())
        is_known = count != tf.data.UNKNOWN_CARDINALITY
        full, rest = divmod(count, size) if count >= 0 else (-1, 0)
        rest = 0 if batch.drop else rest
        found = self._drop_maps(samples)
        summary, index = summary_of(found.ends, self._every), _NO_SUMMARY
        if summary is not None:
            index = len(self.summaries)
            self.summaries.append(summary)
        # If the rows of each batch are known, and no batch is compared, samples need no note beside them.
        carries = summary is not None or not is_known

        def bounds(rows: Any) -> np.ndarray:
            """Returns where this rank's rows begin and how many they are: at least one, so that there is an element."""
            shares = self._shares(int(rows))
            return np.array([min(self._first_row(shares), int(rows) - 1), max(shares[self._rank], 1)], np.int64)

        in_full = bounds(size)

        def note_count(number: tf.Tensor, window: Any) -> tuple[tf.Tensor, tf.Tensor]:
            """Returns the number of rows of a global batch, and the bounds of this rank's rows in it."""
            if is_known or batch.drop:
                is_rest = number >= full if rest else tf.constant(False)
                return tf.where(is_rest, np.int64(rest), np.int64(size)), tf.where(is_rest, bounds(rest or 1), in_full)
            rows = nest.flatten(window)[0].cardinality()
            read = functools.partial(tf.numpy_function, bounds, [rows], tf.int64, stateful=False)
            return rows, tf.ensure_shape(tf.cond(rows < size, read, lambda: tf.constant(in_full)), [2])

        def mine(number: tf.Tensor, window: Any) -> tf.data.Dataset:
            """Returns this rank's samples of one batch. It is called once for each batch; a filter would be called for
            each sample.
            """
            whole = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
            rows, where = note_count(number, window)
            if summary is not None:
                rows += summary.note_after(number, whole)
            note = tf.stack([rows, number, np.int64(index)])
            if not usual:
                nothing = tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape[1:]], s.dtype), batch.element_spec)
                return tf.data.Dataset.from_tensors((nothing, note[None]))
            cut = whole.skip(where[0]).take(where[1])
            return tf.data.Dataset.zip((cut, tf.data.Dataset.from_tensors(note).repeat())) if carries else cut

        own = found.base.window(size, drop_remainder=batch.drop).enumerate().flat_map(mine)
        if usual:
            for one in reversed(found.maps):
                own = own.map(one.on_samples_of(own, carries), *one.parallel)
            # No rank's share of a smaller batch is larger, so the last rows also make a single batch.
            own = batch.put_on(own, usual, carries)
            if not carries:
                own = tf.data.Dataset.zip((own, _notes(size, full, rest)))
        every = size if batch.drop or (is_known and not rest) else 0
        sizes = Sizes(every, ("batch", size, full, rest) if is_known else None)
        leaves = (len(tf.nest.flatten(batch.element_spec)),)
        return OwnRows(own, leaves, sizes, len(found.maps), found.kept, found.reseeded, ())

    def _drop_maps(self, dataset: Any) -> _Samples:
        """Takes off the maps at the end of a dataset of samples that compute each sample by itself, so that they can
        run on this rank's samples only; shuffles and repeats between them are built again below them.
        """
        above: list[Any] = []  # what has to be put on again
        maps: list[_Map] = []
        lowest = 0  # how much of ``above`` lies over a map that moved, or has no seed
        base = dataset
        node = dataset
        while True:
            kind = type(node).__name__
            if kind in _MOVES:
                if is_reshuffled(node) and not _is_unseeded(node) and _has_maps(node) and generator_of(node) is None:
                    break  # a shuffle built in its place could not draw from its generator
                if restarts(node) and _has_maps(node):
                    break  # a map behind the repetition would read ahead, and so begin the next order too early
                above.append(node)
                if _is_unseeded(node):
                    lowest, base = len(above), node._input_dataset
            elif kind in _MAPS and not _state(node):
                maps.append(_Map(_function_of(node), _parallel(node)))
                lowest, base = len(above), node._input_dataset
            elif kind not in UNCHANGED:
                break
            node = node._input_dataset
        ends: tuple[Any, ...] = (node,)
        reseeded = [d for d in above[:lowest] if _is_unseeded(d)]
        if type(node).__name__ == "_ZipDataset":
            parts = [self._drop_maps(one) for one in nest.flatten(node._datasets)]
            ends = tuple(end for p in parts for end in p.ends)
            if any(p.maps or p.reseeded for p in parts):
                lowest = len(above)
                base = tf.data.Dataset.zip(nest.pack_sequence_as(node._datasets, [p.base for p in parts]))
                reseeded = [d for d in above if _is_unseeded(d)] + [d for p in parts for d in p.reseeded]
                for i, part in enumerate(parts):
                    maps += [replace(one, function=_on_part(one.function, node._datasets, i)) for one in part.maps]
        for made in reversed(above[:lowest]):
            base = _put_on(base, made, self._seeds)
        kept = tuple(name for end in ends for name in _maps_in(end))
        return _Samples(base, tuple(maps), ends, kept, tuple(reseeded))


@dataclass(frozen=True)
class _Batch:
    """Describes how samples are put into batches.

    Attributes:
      size: rows of a full batch.
      drop: whether a last smaller batch is dropped.
      element_spec: of the global batches.
      parallel: further arguments of the batch call (``num_parallel_calls``).
      pad: shapes and values with which rows are padded; None: they are not.
    """

    size: int
    drop: bool
    element_spec: Any
    parallel: tuple[Any, ...] = ()
    pad: tuple[Any, Any] | None = None

    def put_on(self, samples: tf.data.Dataset, size: int, carries: bool) -> tf.data.Dataset:
        """Returns ``samples`` in batches of ``size``.

        Args:
          carries: whether each sample is paired with a note, int64[3] of the batch's rows, its number and the index of
            its summary; notes are batched too.
        """
        if self.pad is None:
            return samples.batch(size, False, *self.parallel)
        shapes, values = ((self.pad[0], [3]), (self.pad[1], np.int64(0))) if carries else self.pad
        return samples.padded_batch(size, shapes, values)


@dataclass(frozen=True)
class _Map:
    """Represents a map that computes each sample by itself.

    Attributes:
      function: takes a sample as one argument.
      parallel: further arguments of the map call (``num_parallel_calls``).
    """

    function: Callable[[Sample], Sample]
    parallel: tuple[Any, ...]

    def on_samples_of(self, dataset: Any, carries: bool) -> Callable[..., Any]:
        """Returns the function in the form that ``dataset.map`` needs for the elements of ``dataset``.

        Args:
          carries: whether each element is a sample paired with a note, which is passed through.
        """
        function, is_tuple = self.function, type(dataset.element_spec) is tuple

        @autograph.do_not_convert
        def on_sample(*sample: Any) -> Any:
            return function(sample if is_tuple else sample[0])

        @autograph.do_not_convert
        def map_beside_note(sample: Any, note: tf.Tensor) -> Any:
            return function(sample), note

        return map_beside_note if carries else on_sample


@dataclass(frozen=True)
class _Samples:
    """Represents a dataset of samples without the maps that ``_Division._drop_maps`` has taken off its end.

    Attributes:
      base: the dataset of samples before these maps.
      maps: the maps, from the last to the first.
      ends: the datasets from which the samples come, in the order of their tensors.
      kept: names of maps that could not be taken off, and run on all samples.
      reseeded: shuffles that got a seed.
    """

    base: tf.data.Dataset
    maps: tuple[_Map, ...]
    ends: tuple[Any, ...]
    kept: tuple[str, ...]
    reseeded: tuple[Any, ...]


def _function_of(made: Any) -> Callable[[Sample], Sample]:
    """Returns the function of a map, converted by AutoGraph as tf.data does, with the sample as one argument."""
    converted = autograph.tf_convert(made._map_func._func, ag_ctx.control_status_ctx())

    def function(sample: Sample) -> Sample:
        found = converted(*sample) if type(sample) is tuple else converted(sample)
        return tuple(found) if isinstance(found, list) else found

    return function


def _on_part(function: Callable[[Sample], Sample], zipped: Any, number: int) -> Callable[[Sample], Sample]:
    """Returns a function of zipped samples that applies ``function`` to part number ``number`` of the zip."""

    def on_part(sample: Sample) -> Sample:
        parts = nest.flatten_up_to(zipped, sample)
        parts[number] = function(parts[number])
        return nest.pack_sequence_as(zipped, parts)

    return on_part


def _notes(size: int, full: int, rest: int) -> tf.data.Dataset:
    """Returns a dataset with a note for each batch, int64[1, 3] of the batch's rows, 0 and "no summary"; it is zipped
    with a rank's batches where the rows are known beforehand.

    Args:
      size: rows of each full batch.
      full: number of full batches; -1: without end.
      rest: rows of a last, smaller batch; 0: there is none.
    """
    notes = tf.data.Dataset.from_tensors(np.array([[size, 0, _NO_SUMMARY]], np.int64)).repeat(full)
    if not rest:
        return notes
    return notes.concatenate(tf.data.Dataset.from_tensors(np.array([[rest, 0, _NO_SUMMARY]], np.int64)))


def _ends_in(dataset: Any) -> Unknown:
    """Returns the reason why a dataset's batches cannot be divided, which names its last transformation."""
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
    called = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    name, action = _NEXT_STEPS.get(kind, (called, "put batch(n) last"))
    return Unknown(f"the dataset ends in {name}, not in batch(n)", action)


def refuse_leaves(specs: Sequence[Any]) -> None:
    """Raises Unknown if batches hold something of which a rank cannot take rows, such as ragged tensors or strings.

    Args:
      specs: type specs of all components of a batch.
    """
    for spec in specs:
        for kind, what, action in _WITHOUT_ROWS:
            if isinstance(spec, kind):
                raise Unknown(f"the dataset's batches hold {what}", action)
        if not isinstance(spec, tf.TensorSpec):
            raise Unknown(
                f"the dataset's batches hold a {type(spec).__name__.removesuffix('Spec')}",
                "leave this component out of them",
            )
        if spec.dtype == tf.string:
            action = "number them in a map in front of batch(n) (StringLookup, tf.strings.to_hash_bucket_fast)"
            raise Unknown("the dataset's batches hold strings", action)
        if spec.dtype.name in UNMOVABLE:
            raise Unknown(f"the dataset's batches hold a {spec.dtype.name}", "leave this component out of them")


def batch_size(dataset: Any) -> int:
    """Returns the number of rows of a full batch.

    Raises:
      ProgramError: the dataset does not end in batch(n).
    """
    node = dataset
    while type(node).__name__ in (*UNCHANGED, "_RepeatDataset", "_TakeDataset"):
        node = node._input_dataset
    if type(node).__name__ not in _BATCHES:
        raise ProgramError(
            'wh.shard(dataset, by="file") needs a dataset that ends in batch(n)',
            given=f"a dataset that ends in {type(node).__name__.strip('_').removesuffix('Dataset')}",
            expected="batch(n), then at most prefetch, repeat or take",
            action="put batch(n) last",
        )
    return _number(node._batch_size)


def _maps_in(dataset: Any) -> Iterator[str]:
    """Yields the names of the functions that a dataset is mapped by, without those that TensorFlow inserts."""
    if type(dataset).__name__ == "_RestructuredDataset":
        dataset = dataset._input_dataset._input_dataset
    elif type(dataset).__name__ in _MAPS:
        yield dataset._map_func._func.__name__
    for source in dataset._inputs():
        yield from _maps_in(source)


def _has_maps(dataset: Any) -> bool:
    """Returns True if ``dataset`` ends in shuffles, repeats and the like over a map that computes each sample by
    itself, so that this map could run after them, on one rank's samples only.
    """
    node = dataset
    while type(node).__name__ in (*_MOVES, *UNCHANGED):
        node = node._input_dataset
    if type(node).__name__ == "_ZipDataset":
        return any(map(_has_maps, nest.flatten(node._datasets)))
    return type(node).__name__ in _MAPS and not _state(node)


def _put_on(base: tf.data.Dataset, made: Any, seeds: Seeds) -> tf.data.Dataset:
    kind = type(made).__name__
    if kind == "_RepeatDataset":
        # TensorFlow fuses a shuffle and a repeat that are adjacent, and the fused one draws fewer seeds.
        is_apart = type(made._input_dataset).__name__ != "_ShuffleDataset"
        return (base.prefetch(1) if is_apart and reshuffles(made) else base).repeat(made._count)
    if kind == "_TakeDataset":
        return base.take(made._count)
    if kind == "_SkipDataset":
        return base.skip(made._count)
    if kind == "_ShardDataset":
        return base.shard(made._num_shards, made._index)
    if _is_unseeded(made):
        return shuffle_as(base, made, *common_order(made, seeds))
    return shuffle_as(base, made, (made._seed, made._seed2), generator_of(made) if is_reshuffled(made) else None)


def refuse_other_orders(dataset: tf.data.Dataset, reseeded: Collection[Any] = ()) -> None:
    """Raises ProgramError if the ranks would read different samples, or the same ones in different orders.

    Args:
      reseeded: shuffles that got the same seed on every rank.
    """
    if dataset.options().deterministic is False:
        raise _no_order("options with deterministic=False, made before wh.init()", _NOT_SO_EARLY)
    _refuse_other_orders(dataset, reseeded, True)


def _refuse_other_orders(dataset: Any, reseeded: Collection[Any], values_only: bool) -> None:
    """Raises ProgramError if ranks would read a dataset, or one of those that it is made from, in different orders.

    Args:
      reseeded: shuffles that got the same seed on every rank.
      values_only: whether the values of elements have no influence on which elements follow; random values are then
        allowed.
    """
    kind = type(dataset).__name__
    name = kind.strip("_")
    if _leaves_order_open(dataset):
        raise _no_order(f"{name} with deterministic=False, made before wh.init()", _NOT_SO_EARLY)
    if _is_unseeded(dataset) and not any(dataset is r for r in reseeded):
        raise _no_order(f"{name} without a seed", "give it a seed, or call tf.random.set_seed before")
    values_only = values_only and kind in (*_MAPS, *_MOVES, *_BATCHES, *UNCHANGED)
    for graph in _graphs(dataset):
        for node in graph.values():
            if node.attr["deterministic"].s == b"false":
                raise _no_order(f"{name} of {node.op} with deterministic=False, made before wh.init()", _NOT_SO_EARLY)
            random = node.op in DRAWS and not values_only and _draws_freely(node)
            if random or (node.op.startswith(("ShuffleDataset", "RandomDataset")) and _has_zero_seeds(node, graph)):
                raise _no_order(f"{name} of {node.op} without a seed", "give it a seed")
    for source in dataset._inputs():
        _refuse_other_orders(source, reseeded, values_only)


def _leaves_order_open(dataset: Any) -> bool:
    """Returns True if the dataset yields samples in the order in which they become ready (``deterministic=False``).

    A parallel interleave keeps this option only in its operation's attribute, so the dataset's graph is read.
    """
    if type(dataset).__name__ != "_ParallelInterleaveDataset" or hasattr(dataset, IN_ORDER):
        return bool(getattr(dataset, "_deterministic", "default") == "false")
    return any(node.attr["deterministic"].s == b"false" for node in read_graph(dataset)[:1])


def shuffles_freely(dataset: Any, of_this_run: Callable[[int, int], bool]) -> bool:
    """Returns True if the dataset's order depends on a shuffle to which the script gave no seed, so that another run
    would see another order.

    Args:
      of_this_run: takes a shuffle's two seeds, and returns True if this run has given them to a shuffle without seeds.
    """
    shuffles = (d for d in upstream(dataset) if type(d).__name__ == "_ShuffleDataset")
    return any(_is_unseeded(d) or of_this_run(_number(d._seed), _number(d._seed2)) for d in shuffles)


def _no_order(given: str, action: str) -> ProgramError:
    return ProgramError(
        "the ranks would read the samples of a dataset in different orders",
        given=given,
        expected="the same order on every rank, of which each reads its rows",
        action=f'{action}, or give every rank files of its own: wh.shard(dataset, by="file")',
    )


def _graphs(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yields, for each function that a dataset applies and each function that these call, its nodes by name."""
    for wrapper in dataset._functions():
        graph_def = wrapper.function.graph.as_graph_def()
        yield {node.name: node for node in graph_def.node}
        for function in graph_def.library.function:
            yield {node.name: node for node in function.node_def}


def _state(made: Any) -> str:
    """Returns the type of an operation by which a map's samples depend on earlier ones; "" if each sample is computed
    by itself.
    """
    for graph in _graphs(made):
        for node in graph.values():
            definition = op_def_registry.get(node.op)
            if definition is None or not definition.is_stateful or node.op in _REPEATS:
                continue
            if node.op in DRAWS and _draws_freely(node):
                continue  # without a seed, any numbers are as good as those of one device
            return node.op
    return ""


def _draws_freely(node: Any) -> bool:
    return not (node.attr["seed"].i or node.attr["seed2"].i)


def _is_unseeded(dataset: Any) -> bool:
    seeds = getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None)
    return all(seed is not None and _number(seed) == 0 for seed in seeds)


def _has_zero_seeds(node: Any, graph: Mapping[str, Any]) -> bool:
    """Returns True if both seeds of a shuffle inside a function are the constant 0, so that it draws its own."""
    constants = [graph.get(name.lstrip("^").partition(":")[0]) for name in node.input]
    zeros = [c for c in constants if c is not None and c.op == "Const" and "seed" in c.name.lower()]
    return len(zeros) >= 2 and all(not np.any(tf.make_ndarray(c.attr["value"].tensor)) for c in zeros)


def _number(value: Any) -> int:
    return int(tf.get_static_value(value) if isinstance(value, tf.Tensor) else value)


def _parallel(made: Any) -> tuple[Any, ...]:
    """Returns ``num_parallel_calls`` of a map or batch; nothing behind a cache of shuffled samples, where calls that
    read ahead would decide, on each rank by chance, whether an iteration that stops early has filled it.
    """
    is_parallel = hasattr(made, "_num_parallel_calls") and not keeps_orders(made)
    return (made._num_parallel_calls,) if is_parallel else ()
