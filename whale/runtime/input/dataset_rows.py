"""How one rank reads only its rows of every batch of a tf.data dataset, found from how the dataset was built.

A dataset ``source -> shuffle, repeat, map ... -> batch(n) -> prefetch, repeat, take`` is built again with a selection
of samples by their position in the batch. Maps that compute each sample by itself move behind the selection, over
shuffles and repeats too, so that a rank transforms its own samples only. Whatever is not understood stays in front of
the selection, or is a reason to read everything (``Unknown``): the rows are those of one device in any case.

Decision: 0024.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from whale.errors import ProgramError
from whale.ir.ops import CALLS, DRAWS, HAS_BODIES
from whale.runtime.input.equal_datasets import Summary, summary_of
from whale.runtime.input.shuffle_orders import (
    Seeds,
    common_order,
    generator_of,
    is_reshuffled,
    keeps_orders,
    reshuffles,
    restarts,
    shuffled,
    upstream,
)

Shares = Callable[[int], tuple[int, ...]]
BatchSizes = Callable[[], Iterator[tuple[int, int]]]

UNCHANGED = ("_PrefetchDataset", "_OptionsDataset")
# What moves samples about without looking at them.
_MOVES = ("_ShuffleDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
# Stateful by TensorFlow's word, but equal inputs give equal outputs.
_REPEATS = HAS_BODIES | CALLS | {"Assert", "LookupTableFindV2", "LookupTableSizeV2"}


class Unknown(Exception):
    """Raised with the reason why a rank has to read all rows of a dataset instead of its own."""


@dataclass(frozen=True)
class OwnRows:
    """A rank's part of a dataset.

    Attributes:
      dataset: batches of this rank's rows; batches of which it has no rows are left out.
      batch_sizes: makes an iterator over (number in its round of a repetition, rows) of each global batch.
      moved: number of maps that run on this rank's samples only; kept: names of those that see all samples.
      reseeded: the dataset's shuffles that had no seed, and got one.
      summary: sums up batches that all ranks have to meet alike, where they are not known without reading them.
    """

    dataset: tf.data.Dataset
    batch_sizes: BatchSizes
    moved: int
    kept: tuple[str, ...]
    reseeded: tuple[Any, ...]
    summary: Summary | None


def own_rows(
    dataset: tf.data.Dataset, shares: Shares, rank: int, seeds: Seeds, ahead: int = 0, every: int = 0
) -> OwnRows:
    """``dataset`` cut down to the samples of ``rank``.

    Args:
      shares: rows of every rank, given those of the batch.
      seeds: seeds for a shuffle that has none; equal on all ranks.
      ahead: batches that may be read ahead in a repetition, where reading into the next one would begin its order.
      every: of how many batches one is summed up; 0: none.

    Raises:
      Unknown: the dataset's structure does not allow it.
    """
    kind = type(dataset).__name__
    if kind in UNCHANGED:
        return own_rows(dataset._input_dataset, shares, rank, seeds, ahead, every)
    if kind in ("_RepeatDataset", "_TakeDataset"):
        count = _number(dataset._count)
        inner = own_rows(dataset._input_dataset, shares, rank, seeds, ahead, every)
        if kind == "_TakeDataset":
            sizes = functools.partial(_first, inner.batch_sizes, count)
            return replace(inner, dataset=inner.dataset.take(count), batch_sizes=sizes)
        sizes = functools.partial(_again, inner.batch_sizes, count)
        begins_here = restarts(dataset) and not restarts(dataset._input_dataset)
        repeated = inner.dataset.prefetch(ahead) if ahead and begins_here else inner.dataset
        return replace(inner, dataset=repeated.repeat(count), batch_sizes=sizes)
    if kind not in _BATCHES:
        raise Unknown(f"it ends in {kind.strip('_')}, not in batch(n)")
    return _before_batch(dataset, shares, rank, seeds, every)


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


def _first(sizes: BatchSizes, count: int) -> Iterator[tuple[int, int]]:
    return itertools.islice(sizes(), None if count < 0 else count)


def _again(sizes: BatchSizes, count: int) -> Iterator[tuple[int, int]]:
    rounds: Iterable[Any] = itertools.count() if count < 0 else range(count)
    return itertools.chain.from_iterable(sizes() for _ in rounds)


def _before_batch(batch: Any, shares: Shares, rank: int, seeds: Seeds, every: int) -> OwnRows:
    size, drop = _number(batch._batch_size), bool(_number(batch._drop_remainder))
    samples = batch._input_dataset
    count = int(samples.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        raise Unknown("its number of samples is not known; tf.data.experimental.assert_cardinality tells it")
    stream, maps, kept, reseeded, node = _without_maps(samples, seeds)
    summary = summary_of(node, every)
    usual = shares(size)
    full = 0 if count < 0 else count // size
    rest = () if count < 0 or drop or count % size == 0 else shares(count % size)

    if keeps_orders(samples) and any(most and not few for most, few in zip(usual, rest)):
        raise Unknown("a rank has no rows of the last batch, by which it would know that a cache is full")
    empty = not usual[rank] or (rest and not rest[rank])
    if empty and not all(s.shape[1:].is_fully_defined() for s in tf.nest.flatten(batch.element_spec)):
        raise Unknown("a rank has no rows of some batch, and the shapes of these are not known without reading them")

    skipped = np.array([sum(usual[:rank]), sum(rest[:rank])], np.int64)  # of a full batch, of the last one
    taken = np.array([usual[rank], rest[rank] if rest else 0], np.int64)

    def mine(number: tf.Tensor, samples: Any) -> tf.data.Dataset:
        """This rank's samples among those of one batch. One call a batch: a filter would be one a sample."""
        whole = samples if isinstance(samples, tf.data.Dataset) else tf.data.Dataset.zip(samples)
        kind = 0 if count < 0 else tf.cast(number >= full, tf.int32)
        begin = tf.gather(skipped, kind)
        if summary is not None:
            begin += summary.after(number, whole)
        return whole.skip(begin).take(tf.gather(taken, kind))

    own = stream.window(size).enumerate().flat_map(mine)
    for made in reversed(maps):
        own = own.map(made._map_func._func, *_parallel(made))
    # The shares of a smaller batch are nowhere larger, so that the last rows make one batch as well.
    own = own.batch(max(1, usual[rank]), False, *_parallel(batch))

    def batch_sizes() -> Iterator[tuple[int, int]]:
        if count < 0:
            return enumerate(itertools.repeat(size))
        return enumerate(itertools.chain(itertools.repeat(size, full), (count % size,) if rest else ()))

    return OwnRows(own, batch_sizes, len(maps), kept, reseeded, summary)


def _without_maps(
    dataset: Any, seeds: Seeds
) -> tuple[tf.data.Dataset, list[Any], tuple[str, ...], tuple[Any, ...], Any]:
    """The samples before the maps that may come later.

    Returns:
      (the samples, these maps from the last to the first, names of other maps, shuffles that got a seed, what is left
      of the dataset itself).
    """
    above: list[Any] = []  # what has to be put on again
    maps: list[Any] = []
    lowest = 0  # how much of ``above`` lies over a map that moved, or has no seed
    base = dataset
    node = dataset
    while True:
        kind = type(node).__name__
        if kind in _MOVES:
            if is_reshuffled(node) and not _unseeded(node) and _has_maps(node) and generator_of(node) is None:
                break  # what is built in its place could not draw as it does
            if restarts(node) and _has_maps(node):
                break  # behind the repetition, a map reads ahead: the next order would begin before its time
            above.append(node)
            if _unseeded(node):
                lowest, base = len(above), node._input_dataset
        elif kind in _MAPS and not _state(node):
            maps.append(node)
            lowest, base = len(above), node._input_dataset
        elif kind not in UNCHANGED:
            break
        node = node._input_dataset
    for made in reversed(above[:lowest]):
        base = _put_on(base, made, seeds)
    kept = tuple(d._map_func._func.__name__ for d in upstream(node) if type(d).__name__ in _MAPS)
    return base, maps, kept, tuple(d for d in above[:lowest] if _unseeded(d)), node


def _has_maps(dataset: Any) -> bool:
    """Whether maps lie below that could move over it."""
    node = dataset
    while type(node).__name__ in (*_MOVES, *UNCHANGED):
        node = node._input_dataset
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
    if _unseeded(made):
        return shuffled(base, made, *common_order(made, seeds))
    return shuffled(base, made, (made._seed, made._seed2), generator_of(made) if is_reshuffled(made) else None)


def refuse_other_orders(dataset: tf.data.Dataset, reseeded: Collection[Any] = ()) -> None:
    """Raises ProgramError where every rank would see other samples, or the same ones in another order.

    Args:
      reseeded: shuffles that got the same seed on every rank.
    """
    if dataset.options().deterministic is False:
        raise _no_order("options with deterministic=False", "leave it out")
    _refuse_other_orders(dataset, reseeded, True)


def _refuse_other_orders(dataset: Any, reseeded: Collection[Any], values_only: bool) -> None:
    """``values_only``: what an element holds does not decide which ones there are later on."""
    kind = type(dataset).__name__
    name = kind.strip("_")
    if getattr(dataset, "_deterministic", "default") == "false":
        raise _no_order(f"{name} with deterministic=False", "leave it out")
    if _unseeded(dataset) and not any(dataset is r for r in reseeded):
        raise _no_order(f"{name} without a seed", "give it a seed, or call tf.random.set_seed before")
    values_only = values_only and kind in (*_MAPS, *_MOVES, *_BATCHES, *UNCHANGED)
    for graph in _graphs(dataset):
        for node in graph.values():
            random = node.op in DRAWS and not values_only and _draws_freely(node)
            if random or (node.op.startswith(("ShuffleDataset", "RandomDataset")) and _has_zero_seeds(node, graph)):
                raise _no_order(f"{name} of {node.op} without a seed", "give it a seed")
    for source in dataset._inputs():
        _refuse_other_orders(source, reseeded, values_only)


def shuffles_freely(dataset: Any, of_this_run: Callable[[int, int], bool]) -> bool:
    """Whether a shuffle to which the script gave no seed decides on the order.

    Args:
      of_this_run: whether two seeds are those that this run gave to a shuffle without one.
    """
    shuffles = (d for d in upstream(dataset) if type(d).__name__ == "_ShuffleDataset")
    return any(_unseeded(d) or of_this_run(_number(d._seed), _number(d._seed2)) for d in shuffles)


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


def _unseeded(dataset: Any) -> bool:
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
