"""How one rank reads only its rows of every batch of a tf.data dataset, found from how the dataset was built.

A dataset ``source -> shuffle, repeat, map ... -> batch(n) -> repeat, take, zip ...`` is built again with a selection of
samples by their position in the batch. Maps that compute each sample by itself move behind the selection, over
shuffles, repeats and zips too, so that a rank transforms its own samples only. What stands behind batch(n) and moves
whole batches about is put on the rank's batches as it was on the whole ones. Whatever is not understood stays in front
of the selection, or is a reason to read everything (``Unknown``): the rows are those of one device in any case.

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
    read_graph,
    reshuffles,
    restarts,
    shuffle_as,
    upstream,
)

Shares = Callable[[int], tuple[int, ...]]
Sample = Any  # a structure of tensors

UNCHANGED = ("_PrefetchDataset", "_OptionsDataset")
# What moves samples about without looking at them.
_MOVES = ("_ShuffleDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset", "_ShardDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
# Stateful by TensorFlow's word, but equal inputs give equal outputs.
_REPEATS = HAS_BODIES | CALLS | {"Assert", "LookupTableFindV2", "LookupTableSizeV2"}
_NO_SUMMARY = -1
_NOT_SO_EARLY = "make the dataset after wh.init(), which gives it an order, or leave that out"
_BATCH_LAST = "put batch(n) last: behind it, every transformation is one of whole batches"
# What a script calls a transformation that divides no rows, and what it can do.
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
# Tensors of which a rank takes no rows.
_WITHOUT_ROWS: tuple[tuple[Any, str, str], ...] = (
    (
        tf.RaggedTensorSpec,
        "ragged tensors (ragged_batch, or a map that makes them)",
        "make them dense: padded_batch(n, padded_shapes=...), or .to_tensor(shape=...) in a map in front of batch(n)",
    ),
    (tf.SparseTensorSpec, "sparse tensors", "make them dense: tf.sparse.to_dense in a map in front of batch(n)"),
)


class Unknown(Exception):
    """Raised with the reason why a rank has to read all rows of a dataset instead of its own, and what to do."""

    def __init__(self, reason: str, action: str = "") -> None:
        super().__init__(f"{reason}; {action}" if action else reason)


@dataclass(frozen=True)
class Part:
    """This rank's rows of one global batch.

    Attributes:
      leaves: the tensors, with at least one row; the first ``shares(rows)[rank]`` are this rank's.
      rows: of the global batch.
      met: for each summary that has met the batch, its number in its round of a repetition, and the first of the
        tensors that are of this summary's dataset.
    """

    leaves: list[tf.Tensor]
    rows: int
    met: tuple[tuple[Summary, int, int], ...]


@dataclass(frozen=True)
class Sizes:
    """Describes how many rows the batches of a dataset have, as far as is known without reading it.

    Attributes:
      every: rows of each batch; 0: they may have different ones.
      described: equal for datasets whose batches have the same rows one by one; None: nobody knows.
    """

    every: int
    described: tuple[Any, ...] | None

    def follow(self, *transformation: Any) -> Sizes:
        """Returns those of a dataset that is made of it."""
        return Sizes(self.every, None if self.described is None else (*transformation, self.described))


@dataclass(frozen=True)
class OwnRows:
    """A rank's part of a dataset.

    Attributes:
      dataset: an element for each global batch: ``part`` reads it.
      leaves: how many tensors the batches have, by what is zipped.
      sizes: of the global batches.
      moved: number of maps that run on this rank's samples only; kept: names of those that see all samples.
      reseeded: the dataset's shuffles that had no seed, and got one.
      summaries: of batches that all ranks have to meet alike, where they are not known without reading them.
      reads_ahead: batches are read ahead within each repetition.
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
        """Reads an element of ``dataset``."""
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
    """``dataset`` cut down to the samples of ``rank``.

    Args:
      shares: rows of every rank, given those of the batch.
      first_row: where the rank's rows begin in a batch, given the rows of every rank.
      seeds: seeds for a shuffle that has none; equal on all ranks.
      ahead: batches that may be read ahead in a repetition, where reading into the next one would begin its order.
      every: of how many batches one is compared; 0: none.

    Raises:
      Unknown: the dataset's structure does not allow it.
    """
    division = _Division(shares, rank, first_row, seeds, ahead, every)
    made = division.divide(dataset)
    return replace(made, summaries=tuple(division.summaries))


class _Division:
    """Divides a dataset; the arguments are those of ``own_rows``.

    Attributes:
      summaries: of all of its parts.
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
        """Returns this rank's part of a dataset of batches."""
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
        """Returns a part of a dataset that repeats batches, or leaves some out."""
        inner = self.divide(made._input_dataset)
        if type(made).__name__ == "_RepeatDataset":
            # TensorFlow makes one of a shuffle and a repetition that are side by side: nothing comes between.
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
        """Returns a part of a dataset that shuffles batches: in the same order, as there is one element for each."""
        inner = self.divide(made._input_dataset)
        if self.summaries:
            raise Unknown("it shuffles batches that are compared in the order in which they are read", _BATCH_LAST)
        if is_reshuffled(made) and not _is_unseeded(made) and generator_of(made) is None:
            raise Unknown("the order of its shuffle behind batch(n) is not to be had", _BATCH_LAST)
        sizes = Sizes(inner.sizes.every, None)
        reseeded = (*inner.reseeded, made) if _is_unseeded(made) else inner.reseeded
        return replace(inner, dataset=_put_on(inner.dataset, made, self._seeds), sizes=sizes, reseeded=reseeded)

    def _divide_kept(self, made: Any) -> OwnRows:
        """Returns a part of a dataset that keeps batches in memory: those of this rank."""
        source = made._input_dataset
        drawn = any(n.op in DRAWS for d in upstream(source) for graph in _graphs(d) for n in graph.values())
        if tf.get_static_value(made._filename) or reshuffles(source) or drawn or not is_seen(source):
            raise Unknown(
                "it ends in cache, of batches that are in a file, shuffled, drawn or made by Python",
                "put cache in front of batch(n)",
            )
        inner = self.divide(source)
        return replace(inner, dataset=inner.dataset.cache())

    def _divide_zipped(self, made: Any) -> OwnRows:
        """Returns a part of batches that are zipped: each of them is divided, if all have the same rows."""
        parts = [self.divide(one) for one in nest.flatten(made._datasets)]
        first = parts[0].sizes
        equal = all(p.sizes.every and p.sizes.every == first.every for p in parts)
        if not equal and not all(p.sizes == first and first.described is not None for p in parts):
            raise Unknown(
                "it ends in zip, of batches that may have different numbers of rows",
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
        """Returns a part of batches that are taken of several datasets: of all of them, in the same order."""
        parts = [self.divide(one) for one in datasets]
        first = parts[0]
        if any(p.leaves != first.leaves for p in parts):
            raise Unknown(f"it ends in {what}, of batches that are zipped and others", f"put batch(n) behind {what}")
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
        """Returns a part of batches that are divided into others: of the samples that these are made of."""
        size, drop = tf.get_static_value(rebatch._batch_sizes), bool(_number(rebatch._drop_remainder))
        if np.ndim(size):
            raise Unknown("it ends in rebatch, with sizes that take turns", "rebatch(n) with one size")
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
                    "it ends in padded_batch, which pads rows to the longest one of the whole batch",
                    "give it padded_shapes without None",
                )
        size, drop = _number(batch._batch_size), bool(_number(batch._drop_remainder))
        return self._divide_samples(batch._input_dataset, _Batch(size, drop, batch.element_spec, parallel, pad))

    def _divide_samples(self, samples: Any, batch: _Batch) -> OwnRows:
        """Returns this rank's samples in batches."""
        size, usual = batch.size, self._shares(batch.size)[self._rank]
        if not usual and not all(s.shape[1:].is_fully_defined() for s in tf.nest.flatten(batch.element_spec)):
            raise Unknown("a rank has no rows of any batch, and the shapes of these are not known without reading them")
        count = int(samples.cardinality())
        is_known = count != tf.data.UNKNOWN_CARDINALITY
        full, rest = divmod(count, size) if count >= 0 else (-1, 0)
        rest = 0 if batch.drop else rest
        found = self._drop_maps(samples)
        summary, index = summary_of(found.ends, self._every), _NO_SUMMARY
        if summary is not None:
            index = len(self.summaries)
            self.summaries.append(summary)
        # Where it is known how many rows each batch has, and none is compared, the samples go without a note.
        carries = summary is not None or not is_known

        def bounds(rows: Any) -> np.ndarray:
            """Returns where this rank's rows begin and their number: at least one, so that there is an element."""
            shares = self._shares(int(rows))
            return np.array([min(self._first_row(shares), int(rows) - 1), max(shares[self._rank], 1)], np.int64)

        in_full = bounds(size)

        def note_count(number: tf.Tensor, window: Any) -> tuple[tf.Tensor, tf.Tensor]:
            """The rows of a global batch, and the bounds of this rank's."""
            if is_known or batch.drop:
                is_rest = number >= full if rest else tf.constant(False)
                return tf.where(is_rest, np.int64(rest), np.int64(size)), tf.where(is_rest, bounds(rest or 1), in_full)
            rows = nest.flatten(window)[0].cardinality()
            read = functools.partial(tf.numpy_function, bounds, [rows], tf.int64, stateful=False)
            return rows, tf.ensure_shape(tf.cond(rows < size, read, lambda: tf.constant(in_full)), [2])

        def mine(number: tf.Tensor, window: Any) -> tf.data.Dataset:
            """This rank's samples among those of one batch. One call a batch: a filter would be one a sample."""
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
            # The shares of a smaller batch are nowhere larger, so that the last rows make one batch as well.
            own = batch.put_on(own, usual, carries)
            if not carries:
                own = tf.data.Dataset.zip((own, _notes(size, full, rest)))
        every = size if batch.drop or (is_known and not rest) else 0
        sizes = Sizes(every, ("batch", size, full, rest) if is_known else None)
        leaves = (len(tf.nest.flatten(batch.element_spec)),)
        return OwnRows(own, leaves, sizes, len(found.maps), found.kept, found.reseeded, ())

    def _drop_maps(self, dataset: Any) -> _Samples:
        """Returns the samples before the maps that may come later."""
        above: list[Any] = []  # what has to be put on again
        maps: list[_Map] = []
        lowest = 0  # how much of ``above`` lies over a map that moved, or has no seed
        base = dataset
        node = dataset
        while True:
            kind = type(node).__name__
            if kind in _MOVES:
                if is_reshuffled(node) and not _is_unseeded(node) and _has_maps(node) and generator_of(node) is None:
                    break  # what is built in its place could not draw as it does
                if restarts(node) and _has_maps(node):
                    break  # behind the repetition, a map reads ahead: the next order would begin before its time
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
      element_spec: of the global batches.
      parallel: what its call had beside the size.
      pad: shapes and values with which rows are padded; None: they are not.
    """

    size: int
    drop: bool
    element_spec: Any
    parallel: tuple[Any, ...] = ()
    pad: tuple[Any, Any] | None = None

    def put_on(self, samples: tf.data.Dataset, size: int, carries: bool) -> tf.data.Dataset:
        """Returns samples in batches of another size; ``carries``: each has a note beside it."""
        if self.pad is None:
            return samples.batch(size, False, *self.parallel)
        shapes, values = ((self.pad[0], [3]), (self.pad[1], np.int64(0))) if carries else self.pad
        return samples.padded_batch(size, shapes, values)


@dataclass(frozen=True)
class _Map:
    """A map that computes each sample by itself; ``parallel``: what its call had beside the function."""

    function: Callable[[Sample], Sample]
    parallel: tuple[Any, ...]

    def on_samples_of(self, dataset: Any, carries: bool) -> Callable[..., Any]:
        """Returns its function for the elements of a dataset; ``carries``: which are samples with a note beside."""
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
    """Samples in front of maps that may come later.

    Attributes:
      base: the samples.
      maps: these maps, from the last to the first.
      ends: the datasets from which the samples come as they are, in the order of their tensors.
      kept: names of the maps in front.
      reseeded: shuffles that got a seed.
    """

    base: tf.data.Dataset
    maps: tuple[_Map, ...]
    ends: tuple[Any, ...]
    kept: tuple[str, ...]
    reseeded: tuple[Any, ...]


def _function_of(made: Any) -> Callable[[Sample], Sample]:
    """Returns the function of a map, to be called as tf.data calls it, with a sample in one argument."""
    converted = autograph.tf_convert(made._map_func._func, ag_ctx.control_status_ctx())

    def function(sample: Sample) -> Sample:
        found = converted(*sample) if type(sample) is tuple else converted(sample)
        return tuple(found) if isinstance(found, list) else found

    return function


def _on_part(function: Callable[[Sample], Sample], zipped: Any, number: int) -> Callable[[Sample], Sample]:
    """Returns a function of samples that are zipped, which changes the part of this number."""

    def on_part(sample: Sample) -> Sample:
        parts = nest.flatten_up_to(zipped, sample)
        parts[number] = function(parts[number])
        return nest.pack_sequence_as(zipped, parts)

    return on_part


def _notes(size: int, full: int, rest: int) -> tf.data.Dataset:
    """Notes of so many full batches (-1: without end), and of a last one with so many rows, if it has any."""
    notes = tf.data.Dataset.from_tensors(np.array([[size, 0, _NO_SUMMARY]], np.int64)).repeat(full)
    if not rest:
        return notes
    return notes.concatenate(tf.data.Dataset.from_tensors(np.array([[rest, 0, _NO_SUMMARY]], np.int64)))


def _ends_in(dataset: Any) -> Unknown:
    """Returns why batches of a dataset are not divided, named by its last transformation."""
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
    called = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    name, action = _NEXT_STEPS.get(kind, (called, "put batch(n) last"))
    return Unknown(f"it ends in {name}, not in batch(n)", action)


def refuse_leaves(specs: Sequence[Any]) -> None:
    """Raises Unknown where batches hold what has no rows that a rank could take, given the specs of all in them."""
    for spec in specs:
        for kind, what, action in _WITHOUT_ROWS:
            if isinstance(spec, kind):
                raise Unknown(f"its batches hold {what}", action)
        if not isinstance(spec, tf.TensorSpec):
            raise Unknown(f"its batches hold a {type(spec).__name__.removesuffix('Spec')}", "leave it out of them")
        if spec.dtype == tf.string:
            action = "number them in a map in front of batch(n) (StringLookup, tf.strings.to_hash_bucket_fast)"
            raise Unknown("its batches hold strings", action)
        if spec.dtype.name in UNMOVABLE:
            raise Unknown(f"its batches hold a {spec.dtype.name}", "leave it out of them")


def batch_size(dataset: Any) -> int:
    """Rows of a full batch.

    Raises:
      ProgramError: the dataset does not end in batch(n).
    """
    node = dataset
    while type(node).__name__ in (*UNCHANGED, "_RepeatDataset", "_TakeDataset"):
        node = node._input_dataset
    if type(node).__name__ not in _BATCHES:
        raise ProgramError(
            "a dataset whose files are shared out says how large its batches are",
            given=f"{type(node).__name__.strip('_')} at its end",
            expected="batch(n), then at most prefetch, repeat or take",
            action="put batch(n) last",
        )
    return _number(node._batch_size)


def _maps_in(dataset: Any) -> Iterator[str]:
    """Yields the names of the functions that a dataset is mapped by, but not of those that TensorFlow puts in."""
    if type(dataset).__name__ == "_RestructuredDataset":
        dataset = dataset._input_dataset._input_dataset
    elif type(dataset).__name__ in _MAPS:
        yield dataset._map_func._func.__name__
    for source in dataset._inputs():
        yield from _maps_in(source)


def _has_maps(dataset: Any) -> bool:
    """Whether maps lie below that could move over it."""
    node = dataset
    while type(node).__name__ in (*_MOVES, *UNCHANGED):
        node = node._input_dataset
    if type(node).__name__ == "_ZipDataset":
        return any(map(_has_maps, nest.flatten(node._datasets)))
    return type(node).__name__ in _MAPS and not _state(node)


def _put_on(base: tf.data.Dataset, made: Any, seeds: Seeds) -> tf.data.Dataset:
    kind = type(made).__name__
    if kind == "_RepeatDataset":
        # TensorFlow makes one of a shuffle and a repetition that are side by side; that one draws fewer seeds.
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
    """Raises ProgramError where every rank would see other samples, or the same ones in another order.

    Args:
      reseeded: shuffles that got the same seed on every rank.
    """
    if dataset.options().deterministic is False:
        raise _no_order("options with deterministic=False, made before wh.init()", _NOT_SO_EARLY)
    _refuse_other_orders(dataset, reseeded, True)


def _refuse_other_orders(dataset: Any, reseeded: Collection[Any], values_only: bool) -> None:
    """``values_only``: what an element holds does not decide which ones there are later on."""
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
    """Tells whether samples come as they are ready.

    An interleave that is asked for that keeps nothing of it but what its operation has, which its graph shows.
    """
    if type(dataset).__name__ != "_ParallelInterleaveDataset" or hasattr(dataset, IN_ORDER):
        return bool(getattr(dataset, "_deterministic", "default") == "false")
    return any(node.attr["deterministic"].s == b"false" for node in read_graph(dataset)[:1])


def shuffles_freely(dataset: Any, of_this_run: Callable[[int, int], bool]) -> bool:
    """Whether a shuffle to which the script gave no seed decides on the order.

    Args:
      of_this_run: whether two seeds are those that this run gave to a shuffle without one.
    """
    shuffles = (d for d in upstream(dataset) if type(d).__name__ == "_ShuffleDataset")
    return any(_is_unseeded(d) or of_this_run(_number(d._seed), _number(d._seed2)) for d in shuffles)


def _no_order(given: str, action: str) -> ProgramError:
    return ProgramError(
        "every rank would see the samples of a dataset in another order",
        given=given,
        expected="the same order on every rank, of which each reads its rows",
        action=f'{action}, or give every rank files of its own: wh.shard(dataset, by="file")',
    )


def _graphs(dataset: Any) -> Iterator[dict[str, Any]]:
    """The nodes of the functions that a dataset applies, and of those that they call, by name."""
    for wrapper in dataset._functions():
        graph_def = wrapper.function.graph.as_graph_def()
        yield {node.name: node for node in graph_def.node}
        for function in graph_def.library.function:
            yield {node.name: node for node in function.node_def}


def _state(made: Any) -> str:
    """The operation for which a map's samples depend on those before them; "" if each is computed by itself."""
    for graph in _graphs(made):
        for node in graph.values():
            definition = op_def_registry.get(node.op)
            if definition is None or not definition.is_stateful or node.op in _REPEATS:
                continue
            if node.op in DRAWS and _draws_freely(node):
                continue  # nobody can say what one device would have drawn
            return node.op
    return ""


def _draws_freely(node: Any) -> bool:
    return not (node.attr["seed"].i or node.attr["seed2"].i)


def _is_unseeded(dataset: Any) -> bool:
    seeds = getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None)
    return all(seed is not None and _number(seed) == 0 for seed in seeds)


def _has_zero_seeds(node: Any, graph: Mapping[str, Any]) -> bool:
    """Whether both seeds of a shuffle inside a function are the constant 0."""
    constants = [graph.get(name.lstrip("^").partition(":")[0]) for name in node.input]
    zeros = [c for c in constants if c is not None and c.op == "Const" and "seed" in c.name.lower()]
    return len(zeros) >= 2 and all(not np.any(tf.make_ndarray(c.attr["value"].tensor)) for c in zeros)


def _number(value: Any) -> int:
    return int(tf.get_static_value(value) if isinstance(value, tf.Tensor) else value)


def _parallel(made: Any) -> tuple[Any, ...]:
    return (made._num_parallel_calls,) if hasattr(made, "_num_parallel_calls") else ()
