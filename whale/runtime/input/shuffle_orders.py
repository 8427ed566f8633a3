"""Finds and sets the orders of a dataset's shuffles, through their seed generators.

A shuffle that reshuffles has one seed generator, which belongs to the dataset that the script created. Each iteration
of it, and of datasets made from it, takes the generator's next two seeds. The shuffles that Whale builds in place of
the script's draw from the same generator, so that they have the same orders.

Decision: 0136.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops import gen_dataset_ops

import whale_ops
from whale.errors import ProgramError

Seeds = Callable[[], tuple[int, int]]

# The generator is found in the dataset's graph, which has copies of its arrays; above this size it is not searched.
_LARGEST_BYTES = 256 << 20
_SEEDS_OF_AN_ORDER = 2
_COMPARED = 64  # elements of a cache that tell its order
_GENERATOR = "_whale_generator"
_COMMON = "_whale_common"
_IGNORED = 1  # ExternalStatePolicy of the graph: state outside of the dataset is ignored
_AHEAD = ("_PrefetchDataset", "_ParallelMapDataset", "_ParallelBatchDataset", "_ParallelInterleaveDataset")


def upstream(dataset: Any) -> Iterator[Any]:
    """Yields the dataset and all datasets that it is made from; a dataset that is used twice comes twice."""
    yield dataset
    for source in dataset._inputs():
        yield from upstream(source)


def is_reshuffled(dataset: Any) -> bool:
    """Returns True if the dataset is a shuffle that has another order in each iteration."""
    return type(dataset).__name__ == "_ShuffleDataset" and dataset._reshuffle_each_iteration in (None, True)


def reshuffles(dataset: Any) -> bool:
    """Returns True if the dataset contains a shuffle that has another order in each iteration."""
    return any(map(is_reshuffled, upstream(dataset)))


def repeats(dataset: Any) -> bool:
    """Returns True if a shuffle in the dataset begins its next order during an iteration, because of a repeat or
    concatenate behind it.
    """
    return _begins_again(dataset) or any(map(repeats, dataset._inputs()))


def _begins_again(dataset: Any) -> bool:
    """Returns True if this last transformation makes a shuffle begin another order during an iteration."""
    if type(dataset).__name__ == "_ConcatenateDataset":
        return reshuffles(dataset._dataset_to_concatenate)
    return type(dataset).__name__ == "_RepeatDataset" and reshuffles(dataset)


def keeps_orders(dataset: Any) -> list[Any]:
    """Returns the in-memory caches that hold samples in one order of a reshuffling shuffle; the innermost first.

    Such a cache is full after an iteration has come to its end. All following iterations, of whichever dataset, read
    from it.
    """
    found = {id(d): d for d in upstream(dataset) if type(d).__name__ == "CacheDataset" and reshuffles(d)}
    return [cache for cache in reversed(found.values()) if not tf.get_static_value(cache._filename)]


def restarts(dataset: Any) -> bool:
    """Returns True if a shuffle begins its next order during an iteration (behind repeat or concatenate), exactly at a
    batch that follows from what the script reads.

    Returns False if something behind the repetition reads ahead, since the batch is then uncertain. TensorFlow reads
    ahead behind each stateless map.
    """
    kind = type(dataset).__name__
    if kind in _AHEAD or (kind == "_MapDataset" and not _has_state(dataset)):
        return False
    return _begins_again(dataset) or any(map(restarts, dataset._inputs()))


def _has_state(mapped: Any) -> bool:
    return any(op.op_def.is_stateful for op in mapped._map_func.function.graph.get_operations())


def generator_of(shuffle: Any) -> tf.Tensor | None:
    """Returns the handle of a shuffle's seed generator; None if it cannot be found, or only by copying large arrays."""
    if not hasattr(shuffle, _GENERATOR):
        setattr(shuffle, _GENERATOR, _find_generator(shuffle))
    found: tf.Tensor | None = getattr(shuffle, _GENERATOR)
    return found


def common_order(shuffle: Any, seeds: Seeds) -> tuple[tuple[int, int], tf.Tensor | None]:
    """Returns seeds and a generator to use in place of those of a shuffle without a seed; the same each time for one
    shuffle.

    Args:
      seeds: draws seeds that are equal on all ranks.

    Returns:
      the two seeds; and the generator's handle, None if the shuffle does not reshuffle.
    """
    if not hasattr(shuffle, _COMMON):
        drawn = seeds()
        setattr(shuffle, _COMMON, (drawn, shuffle_as(tf.data.Dataset.range(0), shuffle, drawn, None)))
    drawn, owner = getattr(shuffle, _COMMON)
    if not is_reshuffled(shuffle):
        return drawn, None
    setattr(shuffle, _GENERATOR, _read(owner))
    return drawn, generator_of(shuffle)


def shuffle_as(
    base: tf.data.Dataset, shuffle: Any, seeds: tuple[Any, Any], generator: tf.Tensor | None
) -> tf.data.Dataset:
    """Returns ``base`` shuffled with the buffer size and the kind of ``shuffle``.

    It does not call ``base.shuffle``, which would combine the seeds with TensorFlow's global seed again.

    Args:
      seeds: the two seeds.
      generator: handle of the generator to draw from; None: one of its own, with these seeds.
    """
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(base),
        buffer_size=shuffle._buffer_size,
        seed=tf.cast(seeds[0], tf.int64),
        seed2=tf.cast(seeds[1], tf.int64),
        seed_generator=tf.raw_ops.DummySeedGenerator() if generator is None else generator,
        reshuffle_each_iteration=is_reshuffled(shuffle),
        output_types=tf.nest.flatten(tf.compat.v1.data.get_output_types(base)),
        output_shapes=tf.nest.flatten(tf.compat.v1.data.get_output_shapes(base)),
    )
    return tf.data.experimental.from_variant(variant, base.element_spec)


class Orders:
    """Reads and sets how many seeds the reshuffling shuffles of a dataset have drawn, which decides their next orders;
    for checkpoints of a position in the dataset, and for processes that join.
    """

    def __init__(self, dataset: tf.data.Dataset, ahead: int) -> None:
        """Finds the dataset's shuffles and caches.

        Args:
          ahead: number of batches that an iteration reads ahead of its loop.
        """
        self._ahead = ahead
        self._shuffles = _list_reshuffled(dataset)
        self._draws_later = repeats(dataset) or len(self._shuffles) > 1
        self._caches = keeps_orders(dataset)
        self._takes = any(type(d).__name__ == "_TakeDataset" and keeps_orders(d) for d in upstream(dataset))

    @property
    def has_caches(self) -> bool:
        """Returns True if a cache in memory holds samples in one order of a reshuffling shuffle (``keeps_orders``)."""
        return bool(self._caches)

    @cached_property
    def _generators(self) -> list[tf.Tensor] | None:
        found = [generator_of(one) for one in self._shuffles]
        return None if any(one is None for one in found) else found

    def now(self) -> tuple[int, ...] | None:
        """Returns how many seeds each reshuffling shuffle has drawn so far, from which its next order follows; None if
        that is unknown, because a generator cannot be found.
        """
        if self._generators is None:
            return None
        return tuple([int(whale_ops.load_ops().whale_shuffle_order(one)) for one in self._generators])

    def go_to(self, drawn: Sequence[int]) -> None:
        """Sets how many seeds each shuffle has drawn; it continues with the next one."""
        for generator, count in zip(self._generators or (), drawn, strict=True):
            whale_ops.load_ops().whale_set_shuffle_order(generator, tf.constant(count, tf.int64))

    def begin_at(
        self, drawn: Sequence[int], later: Sequence[int] | None, begin: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        """Begins an iteration with the order that it had when the shuffles had drawn ``drawn`` seeds; iterations begun
        later keep the orders that they would have had.

        Args:
          drawn: for each shuffle, how many seeds it had drawn when the iteration first began.
          later: for each shuffle, how many seeds it had drawn when a position was saved in another process, which this
            one continues; None: this process itself goes back.
          begin: begins the iteration.

        Raises:
          ProgramError: a cache was filled in another order since.
        """
        before = self.now()
        if not drawn or before is None:
            return begin()
        behind = before if later is None else later
        incomplete = [cache for cache in self._caches if not self._is_refilled(cache, drawn, behind, before)]
        self.go_to(drawn)
        elements, read = begin(), list[Any]()
        found = self.now() or before
        # The orders up to here are drawn with the first element; further ones, where an iteration draws several, with
        # what the other process had read ahead.
        for element in itertools.islice(elements, self._ahead + 2 if self._draws_later else 0):
            read.append(element)
            found = self.now() or before
            if not any(map(operator.lt, found, behind)):
                break
        for cache in incomplete:
            own = self._places(cache)
            if all(found[i] == drawn[i] for i in own) and self._count_seeds_behind(cache, before) != [
                drawn[i] for i in own
            ]:
                raise _other_order()
        if any(map(operator.lt, found, behind)):
            self.go_to([max(counts) for counts in zip(behind, found, strict=True)])
        return itertools.chain(read, elements)

    def join(self, drawn: Sequence[int], has_ended: bool) -> None:
        """Makes the shuffles continue like those of another process; called in a process that joins.

        Args:
          drawn: number of seeds that each shuffle has drawn there.
          has_ended: whether an iteration has come to its end there, so that caches are full.

        Raises:
          ProgramError: it is unknown whether caches are full there.
        """
        if self._caches and self._takes:
            raise ProgramError(
                "a process that joins cannot find out what the other ranks' caches hold",
                given="take behind a cache of shuffled samples",
                expected="a cache that each iteration reads to its end, or no cache",
                action="put take in front of cache, or cache in front of shuffle",
            )
        before = self.now()
        if has_ended and before is not None:
            for cache in self._caches:
                self._is_refilled(cache, drawn, drawn, before)
        self.go_to(drawn)

    def _is_refilled(self, cache: Any, drawn: Sequence[int], behind: Sequence[int], before: Sequence[int]) -> bool:
        """Checks whether a cache was already full when an iteration began, so that this iteration drew no seeds; if so,
        fills the cache of this process in the same order.

        Args:
          cache: the cache dataset.
          drawn: for each shuffle, how many seeds it had drawn when the iteration began.
          behind: the same when the iteration was at its saved position.
          before: the same in this process, now.

        Returns:
          True if the cache was full.

        Raises:
          ProgramError: the cache is already full here, in another order.
        """
        own = self._places(cache)
        if any(drawn[i] != behind[i] or not drawn[i] for i in own):
            return False
        first = self._count_seeds_behind(cache, behind)
        counts = list(self.now() or before)
        for i, count in zip(own, first, strict=True):
            counts[i] = count
        self.go_to(counts)
        elements, is_full = self._open(cache)
        if is_full:
            if [before[i] for i in own] != [behind[i] for i in own]:
                raise _other_order()
        else:
            for _ in elements:
                pass
        self.go_to(behind)
        return True

    def find_unknown_fill(self) -> str:
        """Returns why another process could not fill a cache of shuffled samples in the order that it has here; "": it
        could.

        Another process takes the last order that was drawn for that of the cache. It is another one if the cache was
        read by two iterations at once before it was full. Then the first elements differ.
        """
        before = self.now()
        if before is None:
            return ""
        for cache in self._caches:
            own = self._places(cache)
            # Where a single order was drawn, or one iteration draws several, nothing else can have filled it.
            if repeats(cache) or all(before[i] <= _SEEDS_OF_AN_ORDER for i in own):
                continue
            held, is_full = self._open(cache)
            if is_full:
                counts = list(before)
                for i, count in zip(own, self._count_seeds_behind(cache, before), strict=True):
                    counts[i] = count
                self.go_to(counts)
                same = all(map(_are_equal, itertools.islice(held, _COMPARED), cache._input_dataset))
                self.go_to(before)
                if not same:
                    return "a cache of shuffled samples, which two iterations at once have filled"
            self.go_to(before)
        return ""

    def _open(self, cache: Any) -> tuple[Iterator[Any], bool]:
        """Begins an iteration of a cache; returns it, and whether the cache is full, since then it draws no seeds."""
        before = self.now()
        elements = iter(cache)
        return elements, self.now() == before

    def _places(self, cache: Any) -> list[int]:
        """Returns the indices of those shuffles whose order this cache, and no cache in front of it, holds."""
        inner = {id(one) for other in keeps_orders(cache) if other is not cache for one in _list_reshuffled(other)}
        below = {id(one) for one in _list_reshuffled(cache)} - inner
        return [i for i, one in enumerate(self._shuffles) if id(one) in below]

    def _count_seeds_behind(self, cache: Any, behind: Sequence[int]) -> list[int]:
        """Returns, for each shuffle whose order a cache holds, how many seeds it had drawn when the iteration began
        that filled the cache; that is the last iteration that drew any.

        Args:
          behind: for each shuffle, how many seeds it has drawn since.
        """
        own = self._places(cache)
        if not repeats(cache):
            return [behind[i] - _SEEDS_OF_AN_ORDER for i in own]
        before = self.now() or behind
        for _ in cache._input_dataset:
            pass
        now = self.now() or before
        self.go_to(before)
        return [behind[i] - (now[i] - before[i]) for i in own]


def _are_equal(one: Any, other: Any) -> bool:
    """Returns True if two elements of a dataset have the same values; of sparse and ragged tensors, the same parts."""
    mine, theirs = (tf.nest.flatten(element, expand_composites=True) for element in (one, other))
    return all(
        a.shape == b.shape and bool(tf.reduce_all(tf.equal(a, b) | ((a != a) & (b != b))))  # NaN is NaN
        for a, b in zip(mine, theirs, strict=True)
    )


def _list_reshuffled(dataset: Any) -> list[Any]:
    return list({id(d): d for d in upstream(dataset) if is_reshuffled(d)}.values())


def _other_order() -> ProgramError:
    return ProgramError(
        "an iterator cannot go back to an earlier order of its shuffle",
        given="a cache that has been filled in another order since",
        expected="a cache that holds the samples in that order, or is empty",
        action="create the dataset, and wh.shard(dataset), anew before restoring",
    )


def _find_generator(shuffle: Any) -> tf.Tensor | None:
    arrays = (t for d in upstream(shuffle) for t in getattr(d, "_tensors", ()) if isinstance(t, tf.Tensor))
    if sum(t.dtype.size * (t.shape.num_elements() or 0) for t in arrays) > _LARGEST_BYTES:
        return None
    return _read(shuffle)


def _read(shuffle: Any) -> tf.Tensor | None:
    """Returns the handle of a shuffle's generator, which is a constant in the dataset's graph; None if the graph cannot
    be read.
    """
    nodes = read_graph(shuffle)
    if not nodes or nodes[0].op != "ShuffleDatasetV3":
        return None
    handle = next(node for node in nodes if node.name == nodes[0].input[4].partition(":")[0])
    return tf.io.parse_tensor(handle.attr["value"].tensor.SerializeToString(), tf.resource)


def read_graph(dataset: Any) -> list[Any]:
    """Returns the NodeDefs of a dataset's graph, the node that makes the dataset first; [] if the dataset holds what no
    graph can.

    Arrays that the dataset slices are copied into the graph.
    """
    try:
        variant = tf.data.experimental.to_variant(dataset)
        text = gen_dataset_ops.dataset_to_graph_v2(variant, external_state_policy=_IGNORED).numpy()
    except tf.errors.OpError:
        return []
    nodes = {node.name: node for node in graph_pb2.GraphDef.FromString(text).node}
    end = next(node for node in nodes.values() if node.op == "_Retval")
    made = nodes.pop(end.input[0].partition(":")[0])
    return [made, *nodes.values()]
