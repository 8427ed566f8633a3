"""Implements ``wh.shard``: divides a tf.data dataset of global batches, so that each rank reads its rows of every
batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset
from tensorflow.python.ops import gen_dataset_ops

from whale.capture.packing import make_element_packer
from whale.capture.sharded import ShardedTensor as ShardedTensor
from whale.errors import PlanError, ProgramError
from whale.ir.values import UNMOVABLE
from whale.log import log
from whale.runtime.context import Context, require_current
from whale.runtime.input.dataset_position import Epochs, ShardedIterator
from whale.runtime.input.dataset_rows import (
    OwnRows,
    Unknown,
    batch_size,
    own_rows,
    refuse_leaves,
    refuse_other_orders,
    shuffles_freely,
)
from whale.runtime.input.equal_datasets import describe_build, find_drawn_leaves
from whale.runtime.input.equal_inputs import checksums, find_difference, other_datasets, with_whole
from whale.runtime.input.local_batches import (
    ELEMENT_TIMEOUT_S,
    Brought,
    describe_brought,
    describe_failure,
    exchange,
    find_first_row,
    rows_of,
    rows_of_values,
    take_rows,
)
from whale.runtime.input.shuffle_orders import Orders, reshuffles, restarts

Element = Any  # a structure of tensors, as the dataset yields it
_OfDataset = tuple[str, int, int, dict[str, int]]  # element spec, number of batches, a seed, checksums of its build


class ShardedDataset:
    """Represents a dataset that ``wh.shard`` has divided; iterable over batches, and each iteration starts the dataset
    anew.

    Args:
      dataset: yields global batches.
      context: of the run.
      by: "row" or "file", as in ``shard``.
      told: True: the first rank warns if every rank has to read all rows.
      agreed: True: this process joins a run whose ranks created the dataset before, so that nothing is compared with
        them.

    Attributes:
      report: how this rank gets its rows, in one sentence.
    """

    def __init__(
        self, dataset: tf.data.Dataset, context: Context, by: str, told: bool = True, agreed: bool = False
    ) -> None:
        self._whole, self._context, self._by, self._told = dataset, context, by, told
        self._leaves = tf.nest.flatten(dataset.element_spec)
        agreed = agreed or (context.elastic is not None and context.elastic.is_catching_up)  # the others have compared
        shares_rows = context.has_other_processes and by == "row" and not agreed
        self._seed = context.retry_after_loss(self._common_seed) if shares_rows else self._draw_seed()
        self._orders = Orders(dataset, context.config["batch.prefetch"])
        # Elastic runs compare no batches: after a loss or a join, ranks may have begun to read at different places.
        self._every = context.config["debug.check_inputs"] if shares_rows and context.elastic is None else 0
        self._compares = (
            [not drawn for drawn in find_drawn_leaves(dataset)] if self._every else [False] * len(self._leaves)
        )
        self._divide()
        several = context.has_other_processes or context.elastic is not None  # a rank may be alone for a time only
        gave = context.seeds.has_given if context.seeds is not None else lambda *_: False
        self._epochs = Epochs(
            elements=self._iterate_traced,
            begin=lambda: iter(self._read),
            orders=self._orders,
            reshuffles=reshuffles(dataset),
            reproducible="a shuffle without a seed" if shuffles_freely(dataset, gave) else "",
            element_spec=dataset.element_spec,
            parts=context.size if context.has_other_processes and by == "file" else 0,
            cut=self._cut if by == "row" and self._own is None and several else None,
        )
        if context.elastic is not None:
            context.elastic.share_again(self)

    def divide_again(self) -> None:
        """Divides the dataset among the present ranks, after their number or shares have changed; open iterations
        continue with the new rows.
        """
        elastic = self._context.elastic
        self._epochs.may_grow = (
            elastic is not None and elastic.is_keeping_commits and not self._context.has_other_processes
        )
        if self._epochs.cut is None:
            self._told = False
            self._divide()
        self._epochs.divide_again()

    def _divide(self) -> None:
        context, options = self._context, tf.data.Options().merge(self._whole.options())
        self._own: OwnRows | None = None
        self._read: tf.data.Dataset = self._whole
        if not context.has_other_processes and not context.lost_count:
            self.report = "one process: it reads whole batches"
        elif self._by == "file":
            self._read, files = self._read_own_files()
            if context.own_files is not None:
                context.own_files.kept = False
            self.report = f"rank {context.rank} reads {files}, and makes batches of them"
        else:
            self.report = self._read_by_rows()
        if options.threading.private_threadpool_size is None:
            # In TensorFlow's common pool, maps' functions would queue behind the step's kernels, so that reading would
            # not overlap with the step. One thread, to leave the cores to the step.
            options.threading.private_threadpool_size = 1
            if options.autotune.enabled is None:
                # One thread leaves nothing to tune, and destroying an iterator may wait up to a minute for the
                # autotuning thread, with Python's lock held, as that is woken before its stop flag is set.
                options.autotune.enabled = False
        # Reading ahead across a repetition's end begins the next order. A prefetch thread would do that some time after
        # the last batch is taken: on a busy machine perhaps after the next iteration has begun, and on one rank only.
        self._one_ahead = self._orders.has_caches or (self._own is not None and self._own.reads_ahead)
        if self._one_ahead:
            options.experimental_optimization.inject_prefetch = False
            if self._orders.has_caches:  # maps that TensorFlow makes parallel, or joins with batch, read on into it
                options.experimental_optimization.map_parallelization = False
                options.experimental_optimization.map_and_batch_fusion = False
            self._read = self._read.with_options(options)
            return
        ahead = context.config["batch.prefetch"]
        if restarts(self._whole):  # reading ahead may begin an order: read no further ahead than TensorFlow itself does
            ahead = 1
            options.experimental_optimization.inject_prefetch = False
        self._read = self._read.with_options(options).prefetch(ahead)

    @property
    def whole(self) -> tf.data.Dataset:
        """Returns the dataset that was passed to ``wh.shard``, which yields global batches."""
        return self._whole

    @cached_property
    def build(self) -> dict[str, int]:
        """Returns checksums of what decides the dataset's elements (functions, constants, seeds), by description; {} if
        inputs are not compared.

        Floating-point values are left out, since ranks may round them differently. ``wh.State`` compares the checksums
        in a process that joins.
        """
        if not self._context.config["debug.check_inputs"]:
            return {}
        parts = describe_build(self._whole)
        return checksums({name: part for name, part in parts.items() if not part.dtype.is_floating})

    @property
    def begun(self) -> tuple[int, tuple[int, ...] | None, bool]:
        """Returns how far iterations have come, for a process that joins: the number of iterations begun, the number of
        seeds that each shuffle has drawn (None: unknown), and whether an iteration has come to its end.

        A joining process sets it to the other ranks' value.
        """
        return self._epochs.begun, self._orders.now(), self._epochs.has_ended

    @begun.setter
    def begun(self, others: tuple[int, tuple[int, ...] | None, bool]) -> None:
        self._epochs.begun, drawn, self._epochs.has_ended = others
        if drawn is not None:
            self._orders.join(drawn, self._epochs.has_ended)

    @property
    def element_spec(self) -> Any:
        """Returns the structure and types of a whole batch."""
        return self._whole.element_spec

    def __len__(self) -> int:
        """Returns the number of batches; raises TypeError if tf.data does not know it."""
        return len(self._whole)

    def __repr__(self) -> str:
        return f"<wh.shard of {self._whole!r}: {self.report}>"

    def __iter__(self) -> ShardedIterator:
        made = ShardedIterator(self._epochs)
        if self._orders.now():  # an iterator of the dataset begins at once; otherwise a restored one could not
            made.begin()
        return made

    def _iterate_traced(self, start: int) -> Iterator[Element]:
        trace = self._context.trace
        return self._elements(start) if trace is None else trace.trace_batches(self._elements(start))

    def _elements(self, start: int) -> Iterator[Element]:
        """Yields this rank's batches from number ``start`` on."""
        if self._own is not None:
            return self._own_elements(self._own, start)
        if self._by == "file" and self._context.has_other_processes:
            return self._elements_of_files(start)
        return self._iterate_read(start)

    def _iterate_read(self, start: int) -> Iterator[Any]:
        """Yields the elements that this rank's dataset reads, from number ``start`` on; flat ones if these are its rows
        only.

        When a loop stops early, what was read ahead decides whether a cache is full and which order a shuffle is in.
        TensorFlow reads ahead in a loop by as much as its threads get to; here every rank reads exactly one batch ahead
        in such datasets, so that all stay in step.
        """
        elements = iter(_skip(self._read, start))
        elements = iterate_elements(elements, packs=self._own is None)
        return _one_ahead(elements) if self._one_ahead else elements

    # -- rows of global batches

    def _read_by_rows(self) -> str:
        """Sets up reading by rows: this rank's rows only where the dataset allows that, else all rows; returns the
        report.
        """
        rank = self._context.rank
        seeds = ((self._seed, i) for i in itertools.count(1))
        try:
            refuse_leaves(self._leaves)
            ahead = self._context.config["batch.prefetch"]
            first = partial(find_first_row, context=self._context)
            own = own_rows(self._whole, self._shares, rank, first, lambda: next(seeds), ahead, self._every)
            if self._context.elastic is not None and self._orders.now() is None:
                raise Unknown(
                    "the dataset's shuffle has a seed generator that cannot be read, as a loss of ranks would require"
                )
        except Unknown as reason:
            refuse_other_orders(self._whole)
            text = f"every rank reads all rows and keeps its own: {reason}"
            if rank == 0 and self._told:
                log.warning(f"wh.shard: {text}")
            return text
        refuse_other_orders(self._whole, own.reseeded)
        self._own, self._read = own, own.dataset
        behind = f"; {', '.join(own.kept)} run for all samples" if own.kept else ""
        return f"rank {rank} reads its rows of every batch; {own.moved} maps run for its samples only{behind}"

    def _shares(self, rows: int) -> tuple[int, ...]:
        return rows_of(rows, self._context)

    def _common_seed(self) -> int:
        """Returns a seed that rank 0 draws, for shuffles without one, and checks that all ranks have the same dataset.
        Collective.

        Raises:
          ProgramError: a rank's dataset has other types, another number of batches, or is built differently.
        """
        context = self._context
        drawn = self._draw_seed()
        parts = describe_build(self._whole) if context.config["debug.check_inputs"] else {}
        mine = str(self._whole.element_spec), int(self._whole.cardinality()), drawn, checksums(parts)
        key, context.elements = f"whale/element/{context.elements}", context.elements + 1

        def exchange(data: bytes) -> list[bytes]:
            return context.comms[0].allgather_bytes(key, data, ELEMENT_TIMEOUT_S)

        said = [msgspec.json.decode(one, type=_OfDataset) for one in exchange(msgspec.json.encode(mine))]
        (spec, count, seed, _), *others = said
        for rank, (other_spec, other_count, *_) in enumerate(others, 1):
            if (other_spec, other_count) != (spec, count):
                raise ProgramError(
                    "the ranks pass different datasets to wh.shard",
                    given=f"rank 0 has {spec}, {count} batches; rank {rank} has {other_spec}, {other_count} batches",
                    expected="the same dataset on every rank (-1 batches: infinite, -2: unknown)",
                    action='remove what depends on the rank, or use by="file"',
                )
        found = find_difference([sums for *_, sums in said], parts, exchange, rounding=parts)
        if found is not None:
            raise other_datasets(found, context)
        return seed

    def _draw_seed(self) -> int:
        """Returns a seed for a shuffle without one, which is equal on all ranks, also in a process that joins later; 0
        if there are no other processes.
        """
        return self._context.seeds.draw() % (1 << 31) + 1 if self._context.seeds is not None else 0

    def _own_elements(self, own: OwnRows, start: int) -> Iterator[Element]:
        for summary in own.summaries:
            summary.begin()
        # Skipped batches are read too if they are compared, so that all ranks record the same ones.
        elements = self._iterate_read(0 if own.summaries else start)
        for element in itertools.islice(elements, start if own.summaries else 0):
            for summary, number, _ in own.part(element).met:
                summary.find(number)
        return self._iterate_own_rows(elements, own)

    def _iterate_own_rows(self, elements: Iterator[Any], own: OwnRows) -> Iterator[Element]:
        rank = self._context.rank
        for element in elements:
            part = own.part(element)
            sizes = self._shares(part.rows)
            local = part.leaves if sizes[rank] else [t[:0] for t in part.leaves]
            for summary, number, first in part.met:
                for tensor, whole in zip(local[first:], summary.find(number)):
                    with_whole(tensor, whole)
            alone = len(sizes) == 1  # the others are gone
            yield self._element(local if alone else [ShardedTensor(t, sizes, rank) for t in local])
        for summary in own.summaries:
            summary.end()

    def _cut(self, element: Element) -> Element:
        """Returns this rank's part of a whole batch: its rows of each tensor that has the batch's rows, other tensors
        unchanged.
        """
        rank, leaves = self._context.rank, tf.nest.flatten(element)
        rows = next((t.shape[0] for t in leaves if _divisible(t)), None)
        if rows is None or not self._context.has_other_processes:
            return element
        sizes = self._shares(rows)
        start = find_first_row(sizes, self._context)
        own = slice(start, start + sizes[rank])

        def cut(t: Any, compared: bool) -> Any:
            if not _divisible(t) or t.shape[0] != rows:
                return t
            part = take_rows(np.asarray(t), own) if "CPU" in t.device else t[own]
            return ShardedTensor(with_whole(part, t) if compared else part, sizes, rank)

        return self._element(map(cut, leaves, self._compares))

    # -- files

    def _read_own_files(self) -> tuple[tf.data.Dataset, str]:
        """Returns the dataset of batches that this rank makes of its own files, and a description of these files.

        Raises:
          ProgramError: the dataset does not read files, or too few of them.
        """
        context = self._context
        usual = self._shares(batch_size(self._whole))
        readers = [rank for rank, rows in enumerate(usual) if rows]
        if context.rank not in readers:
            return self._whole.take(0), "no files, since its share is 0"
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        index = readers.index(context.rank)
        try:
            own = _AutoShardDataset(self._whole.with_options(options), len(readers), index)
        except tf.errors.OpError as error:
            raise ProgramError(
                "the files of a dataset cannot be divided among the ranks",
                given=(error.message or "").splitlines()[0],
                expected=f"a dataset that reads at least {len(readers)} files",
                action="write the data to more files, or divide rows: wh.shard(dataset)",
            ) from None
        return own.rebatch(usual[context.rank]), f"part {index} of {len(readers)} of the files"

    def _elements_of_files(self, start: int) -> Iterator[Element]:
        """Yields this rank's parts of batches that the ranks make of their own files; a rank that has come to its end
        contributes no rows until all have. Collective.
        """
        return self._iterate_own_files(self._iterate_read(start))

    def _iterate_own_files(self, own: Iterator[Any]) -> Iterator[Element]:
        rank, names = self._context.rank, [s.name or f"value {i}" for i, s in enumerate(self._leaves)]
        local: list[Any] | None = []
        while True:
            try:
                element = next(own, None) if local is not None else None
            except tf.errors.OpError as error:
                exchange(describe_failure(error), self._context)
                raise
            local = None if element is None else tf.nest.flatten(element)
            everyone = exchange(Brought(ended=True) if local is None else describe_brought(local), self._context)
            if all(b.ended for b in everyone):
                return
            rows = rows_of_values(everyone, names)
            if local is None:
                shapes = next(b.values for b in everyone if not b.ended)
                parts = [tf.zeros([0, *shape[1:]], dtype) for dtype, shape in shapes]
            else:
                parts = local
            yield self._element(
                [t if sizes is None else ShardedTensor(t, sizes, rank) for t, sizes in zip(parts, rows)]
            )

    @cached_property
    def _pack(self) -> Callable[[Iterable[Any]], Element]:
        return make_element_packer(self._whole.element_spec)

    def _element(self, leaves: Iterable[Any]) -> Element:
        return self._pack(leaves)


def shard(dataset: tf.data.Dataset, by: str = "row") -> ShardedDataset:
    """Divides a dataset of global batches: each rank reads its rows of every batch, and together they are that batch.

    Use it where the loop takes its batches: ``for x, y in wh.shard(dataset): step(x, y)``. Its elements are those of
    ``dataset`` with a ``wh.ShardedTensor`` in place of every tensor that has the batch's rows; a step of
    ``wh.function`` takes them as the whole batch. The rows of each rank follow ``batch.shares``. At most
    ``batch.prefetch`` batches are read ahead. In one process (with the in-process transport too) its elements are whole
    batches.

    Args:
      dataset: yields global batches: rows are dimension 0 of the tensors that have as many rows as the first one. Best
        is ``....batch(n)``, then perhaps prefetch, repeat or take: a rank then transforms only its rows in the maps
        before. It is the same dataset, in the same order, on every rank.
      by: "row", which is exact; or "file": each rank reads files of its own, and the global batch is what the ranks
        made of them, in order of ranks. Epochs then hold the same samples, in other batches.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: the ranks have different datasets, or would see them in different orders; or files cannot be
        divided.
    """
    context = require_current("wh.shard")
    if by not in ("row", "file"):
        raise PlanError(
            "the argument `by` of wh.shard names no way of dividing a dataset",
            given=f"by={by!r}",
            expected='by="row" or by="file"',
            action='leave by out, or pass "file" where each rank reads files of its own',
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise _no_dataset(dataset)
    if not tf.executing_eagerly():
        raise ProgramError(
            "wh.shard is for loops in Python",
            given="a call while a graph is being built",
            expected="eager execution",
            action="use the dataset itself: a wh.Session reads it on the first rank and divides its batches",
        )
    if context.elastic is not None and by == "file":
        raise PlanError(
            "an elastic run cannot divide a dataset by files, since those of a lost rank would be lost",
            given='wh.shard(dataset, by="file") in a run with fault.elastic (wh.init(elastic=True))',
            expected='by="row", where other ranks can read the rows of a lost rank',
            action="write wh.shard(dataset), or leave elastic=True (fault.elastic) out",
        )
    return ShardedDataset(dataset, context, by)


def _no_dataset(given: Any) -> ProgramError:
    """Creates the error for an argument of ``wh.shard`` that is not a tf.data dataset, with advice for its type."""
    kind, of = type(given).__name__, "x"
    shown = kind
    if isinstance(given, (tuple, list, dict)):
        of = "(x, y)" if len(given) > 1 else "x"
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        shown = f"{kind} {tf.as_dtype(given.dtype).name}{list(given.shape)}"
    action = f"wh.shard(tf.data.Dataset.from_tensor_slices({of}).batch(n)), or pass arrays whole to the step"
    if isinstance(given, ShardedDataset):
        action = "iterate over it as it is: each rank reads its rows of it already"
    elif isinstance(given, (tf.data.Iterator, tf.data.NumpyIterator)):
        action = "give it the dataset instead of an iterator over it: wh.shard(dataset)"
    elif callable(given) or hasattr(given, "__next__"):
        action = "wh.shard(tf.data.Dataset.from_generator(...).batch(n)), or pass what it yields whole to the step"
    return ProgramError(
        "wh.shard takes a tf.data dataset", given=shown, expected="a tf.data.Dataset of global batches", action=action
    )


def _one_ahead(elements: Iterator[Any]) -> Iterator[Any]:
    ahead = next(elements, None)
    while ahead is not None:
        element, ahead = ahead, next(elements, None)
        yield element


def iterate_elements(elements: Any, packs: bool = True) -> Iterator[Any]:
    """Yields the elements of TensorFlow's iterator of a dataset, in eager code. The iterator itself finds out anew for
    each element how its tensors are to be packed, which takes longer than reading a small batch.

    Args:
      elements: the iterator.
      packs: whether elements have their structure; if not, they are flat lists.
    """
    spec = elements.element_spec
    if not all(type(one) is tf.TensorSpec for one in tf.nest.flatten(spec)):
        yield from elements
        return
    pack = make_element_packer(spec) if packs else list
    types, shapes = elements._flat_output_types, elements._flat_output_shapes
    while True:
        try:
            flat = gen_dataset_ops.iterator_get_next(elements._iterator_resource, types, shapes)
        except tf.errors.OutOfRangeError:
            return
        yield pack(flat)


def _skip(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    return dataset.skip(count) if count else dataset


def _divisible(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank and value.dtype.name not in UNMOVABLE
