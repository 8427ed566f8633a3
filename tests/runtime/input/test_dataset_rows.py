"""A rank's rows of a dataset: together they are the batches of one device, and maps see a rank's samples only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.capture.sharded import ShardedTensor
from whale.config import Config, Mesh
from whale.errors import ProgramError
from whale.runtime.input.data import ShardedDataset

Make = Callable[[], tf.data.Dataset]


class _Comm:
    """Stands for processes that all say what the first one says."""

    def __init__(self, size: int, said: dict[str, bytes]) -> None:
        self.size, self.said = size, said

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float) -> list[bytes]:
        return [self.said.setdefault(key, data)] * self.size


@dataclass
class _Rank:
    """What a dataset asks a context for."""

    rank: int
    size: int
    comms: list[_Comm]
    config: Config
    elements: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    rank_order: tuple[int, ...] = ()
    has_other_processes: bool = True
    trace: None = None
    elastic: None = None
    lost_count: int = 0

    @staticmethod
    def retry_after_loss(call: Callable[[], Any]) -> Any:
        return call()

    seeds: None = None
    dry: Any = field(default=None)


def of_ranks(make: Make, size: int, shares: tuple[int, ...] = ()) -> list[ShardedDataset]:
    """The dataset as each rank has it; every rank builds its own, as every process does."""
    said: dict[str, bytes] = {}
    config = Config({"batch.shares": shares}, environment={})
    return [ShardedDataset(make(), _Rank(r, size, [_Comm(size, said)], config), "row") for r in range(size)]


def joined(parts: list[Any]) -> Any:
    """A batch of the ranks' parts."""
    if not isinstance(parts[0], ShardedTensor):
        return parts[0].numpy()
    assert [p.rank for p in parts] == list(range(len(parts)))
    assert len({p.sizes for p in parts}) == 1
    whole = np.concatenate([p.local.numpy() for p in parts])
    assert whole.shape == tuple(parts[0].shape)
    return whole


def same_batches(make: Make, size: int, shares: tuple[int, ...] = (), epochs: int = 2) -> list[ShardedDataset]:
    """Asserts that the ranks read the batches of one device; returns their datasets."""
    ranks, plain = of_ranks(make, size, shares), make()
    for _ in range(epochs):
        wanted = [tf.nest.map_structure(lambda t: t.numpy(), element) for element in plain.take(40)]
        found = [list(zip(range(40), dataset)) for dataset in ranks]
        assert [len(f) for f in found] == [len(wanted)] * size
        for parts, element in zip(zip(*found), wanted):
            whole = tf.nest.map_structure(lambda *p: joined(list(p)), *(part for _, part in parts))
            tf.nest.assert_same_structure(whole, element)
            for a, b in zip(tf.nest.flatten(whole), tf.nest.flatten(element)):
                np.testing.assert_array_equal(a, b)
    return ranks


def samples(count: int) -> tf.data.Dataset:
    x = np.random.default_rng(0).normal(size=(count, 3))
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": np.arange(count)})


def double(sample: Any) -> Any:
    return {"x": 2 * sample["x"], "y": sample["y"]}


def doubles(sample: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(sample).repeat(2)


def jitter(sample: Any) -> Any:
    return {"x": sample["x"] + tf.random.uniform([3], seed=4, dtype=tf.float64), "y": sample["y"]}


def truncated() -> tf.Tensor:
    return tf.raw_ops.ParameterizedTruncatedNormal(shape=[1], means=0.0, stdevs=1.0, minvals=-1.0, maxvals=1.0)


def odd(sample: Any) -> Any:
    return sample["y"] % 2 == 1


def doubled(count: int) -> tf.data.Dataset:
    return samples(count).map(double)


def twice(number: Any) -> Any:
    return 2 * number


def pairs(count: int) -> tf.data.Dataset:
    return samples(count).map(lambda s: [s["y"], 2 * s["y"]])


def lengths() -> tf.data.Dataset:
    return tf.data.Dataset.range(1, 12).map(lambda n: tf.fill([n], n))


def generated(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: range(count), output_signature=tf.TensorSpec([], tf.int64))


def generated_samples(count: int) -> tf.data.Dataset:
    return generated(count).map(lambda n: {"x": tf.fill([3], tf.cast(n, tf.float64)), "y": n})


def sampled(*datasets: tf.data.Dataset) -> tf.data.Dataset:
    return tf.data.Dataset.sample_from_datasets(list(datasets), [0.3, 0.7], seed=4)


CHAINS: dict[str, tuple[Make, int, str]] = {
    # name -> (dataset, maps that see a rank's samples only, or -1 where all rows are read; what the report says)
    "plain": (lambda: samples(21).batch(8), 0, "its rows"),
    "dropped rest": (lambda: samples(21).map(double).batch(8, drop_remainder=True), 1, "its rows"),
    "a rest of one row": (lambda: samples(17).map(double).batch(8), 1, "its rows"),
    "less than a batch": (lambda: samples(2).map(double).batch(8), 1, "its rows"),
    "over a shuffle": (lambda: samples(21).map(double).shuffle(9, seed=3).map(double).batch(8), 2, "its rows"),
    "same order again": (
        lambda: samples(21).map(double).shuffle(9, 3, reshuffle_each_iteration=False).batch(8), 1, "its rows"),
    "over a repeat": (lambda: samples(7).map(double).repeat(3).skip(2).take(17).batch(8), 1, "its rows"),
    "without end": (lambda: samples(7).map(double).repeat().batch(4).prefetch(1), 1, "its rows"),
    "repeated batches": (lambda: samples(10).map(double).batch(4).repeat(3).take(8).prefetch(2), 1, "its rows"),
    "parallel": (lambda: samples(21).map(double, num_parallel_calls=3).batch(8, num_parallel_calls=2), 1, "its rows"),
    "kept in memory": (lambda: samples(21).map(double).cache().map(double).batch(8), 1, "double run for all samples"),
    "draws with a seed": (lambda: samples(21).map(jitter).map(double).batch(8), 1, "jitter run for all samples"),
    "known count": (
        lambda: samples(21).filter(odd).apply(tf.data.experimental.assert_cardinality(10)).map(double).batch(4),
        1, "its rows"),
    "unknown count": (lambda: samples(21).filter(odd).map(double).batch(4), 1, "its rows"),
    "unknown count, a rest of one row": (lambda: samples(18).filter(odd).map(double).batch(4), 1, "its rows"),
    "unknown count, without a rest": (
        lambda: samples(21).filter(odd).map(double).batch(4, drop_remainder=True).repeat(2), 1, "its rows"),
    "a generator": (lambda: generated(11).map(lambda n: 2 * n).shuffle(4, seed=2).batch(4), 1, "its rows"),
    "none at all": (lambda: samples(9).filter(lambda s: False).batch(4), 0, "its rows"),
    "enumerated": (lambda: samples(11).enumerate().map(lambda i, s: (i, double(s))).batch(4), 1, "its rows"),
    "zip": (lambda: tf.data.Dataset.zip((doubled(11), samples(12).skip(1))).shuffle(5, seed=2).batch(4), 1, "its rows"),
    "zip of maps": (
        lambda: tf.data.Dataset.zip({"a": doubled(11), "b": (doubled(9), tf.data.Dataset.range(20).map(twice))})
        .map(lambda s: (s["a"]["x"], s["b"][0]["y"], s["b"][1])).batch(4), 4, "its rows"),
    "zip of lists from maps": (
        lambda: tf.data.Dataset.zip((pairs(9), tf.data.Dataset.range(9))).batch(4), 1, "its rows"),
    "zip of unknown counts": (
        lambda: tf.data.Dataset.zip((doubled(21).filter(odd), generated(7).map(twice))).batch(4), 1,
        "double run for all samples"),
    "zip of batches": (
        lambda: tf.data.Dataset.zip((doubled(21).batch(4), tf.data.Dataset.range(21).map(twice).batch(4))), 2,
        "its rows"),
    "zip of full batches": (
        lambda: tf.data.Dataset.zip((doubled(21).batch(4, True), generated(14).batch(4, True))).repeat(2), 1,
        "its rows"),
    "zip of shuffled batches": (
        lambda: tf.data.Dataset.zip(tuple(doubled(12).shuffle(9, seed=i).repeat().batch(4) for i in range(2))), 0,
        "double, double run for all samples"),
    "zip of other rests": (
        lambda: tf.data.Dataset.zip((samples(9).batch(4), samples(11).batch(4))), -1, "put batch(n) behind"),
    "zip of other batches": (
        lambda: tf.data.Dataset.zip((samples(8).batch(2), samples(24).batch(6))), -1, "zip(wh.shard(a), wh.shard(b))"),
    "zip of batches of unknown counts": (
        lambda: tf.data.Dataset.zip((samples(9).batch(4), generated(9).batch(4))), -1, "zip the samples"),
    "concatenated": (lambda: doubled(9).concatenate(samples(5)).map(double).batch(4), 1, "double run for all samples"),
    "concatenated batches": (lambda: doubled(9).batch(4).concatenate(doubled(7).batch(3)).repeat(2), 2, "its rows"),
    "concatenated generators": (
        lambda: generated(6).batch(4).concatenate(generated(5).batch(4)).repeat(2), 0, "its rows"),
    "concatenated with zipped": (
        lambda: tf.data.Dataset.zip((samples(9), samples(9))).batch(4)
        .concatenate(tf.data.Dataset.zip((samples(8).batch(4), samples(8).batch(4)))), -1,
        "put batch(n) behind concatenate"),
    "sampled": (lambda: sampled(doubled(9), samples(7).repeat(2)).map(double).batch(4), 1, "its rows"),
    "sampled batches": (lambda: sampled(doubled(9).batch(4), generated_samples(7).batch(3)), 2, "its rows"),
    "chosen batches": (
        lambda: tf.data.Dataset.choose_from_datasets(
            [doubled(9).batch(4), doubled(9).shuffle(5, seed=1).batch(4)], tf.data.Dataset.range(2).repeat(3)),
        2, "its rows"),
    "interleaved": (
        lambda: tf.data.Dataset.range(4).interleave(lambda n: tf.data.Dataset.range(n, n + 5)).map(twice).batch(4), 1,
        "its rows"),
    "interleaved batches": (
        lambda: tf.data.Dataset.range(4).interleave(lambda n: tf.data.Dataset.range(n, n + 5).batch(2)), -1,
        "the dataset ends in interleave, not in batch(n); have the function give samples, and put batch(n) behind "
        "interleave"),
    "flat batches": (
        lambda: tf.data.Dataset.range(4).flat_map(lambda n: tf.data.Dataset.range(n, n + 5).batch(2)), -1, "flat_map"),
    "rebatch": (lambda: doubled(21).batch(4).rebatch(6), 1, "its rows"),
    "rebatch of what was dropped": (lambda: doubled(21).batch(4, True).rebatch(6), 0, "its rows"),
    "rebatch of other batches": (lambda: doubled(5).batch(2).map(double).rebatch(4, True), 0, "double run for all"),
    "unbatch": (lambda: samples(21).batch(4, True).map(double).unbatch().map(double).batch(6), 1, "its rows"),
    "without batch": (lambda: samples(21).batch(4).unbatch(), -1, "put batch(n) behind unbatch"),
    "batches in another order": (lambda: doubled(21).batch(4).shuffle(9, seed=3).repeat(2), 1, "its rows"),
    "batches of a generator in another order": (
        lambda: generated(9).batch(4).shuffle(3, seed=3), -1, "the dataset shuffles"),
    "some of the batches": (lambda: doubled(30).batch(4).skip(1).shard(2, 1).repeat(2), 1, "its rows"),
    "some of a generator's": (lambda: generated(30).batch(4).skip(1).shard(2, 1).repeat(2), 0, "its rows"),
    "batches kept in memory": (lambda: doubled(21).batch(4).cache().repeat(2), 1, "its rows"),
    "drawn batches kept in memory": (lambda: samples(9).map(jitter).batch(4).cache(), -1, "cache in front of batch(n)"),
    "batch statistics": (
        lambda: samples(21).batch(8).map(lambda b: b["x"] - tf.reduce_mean(b["x"])), -1,
        "put map in front of batch(n)"),
    "padded": (lambda: lengths().padded_batch(4), -1, "padded_shapes without None"),
    "padded to one length": (lambda: lengths().padded_batch(4, [12]), 1, "its rows"),
    "a generator, padded": (
        lambda: generated(11).map(lambda n: (n, tf.fill([n], n))).padded_batch(4, ([], [12]), np.int64(7)), 1,
        "its rows"),
    "buckets": (
        lambda: lengths().bucket_by_sequence_length(tf.size, [4, 8], [3, 3, 3]), -1, "bucket_by_sequence_length"),
    "windows": (
        lambda: tf.data.Dataset.range(9).group_by_window(lambda n: n % 2, lambda _, w: w.batch(3), window_size=3), -1,
        "compute what is costly in the step"),
    "strings": (lambda: samples(9).map(lambda s: (s["x"], tf.as_string(s["y"]))).batch(4), -1, "strings"),
    "arrays of batches": (
        lambda: tf.data.Dataset.from_tensor_slices((np.ones((3, 4, 2)), np.arange(3.0))), -1, "from_tensor_slices"),
}  # fmt: skip


IN_HALVES = ("plain", "over a shuffle", "repeated batches", "unknown count", "zip of batches", "sampled")


@pytest.mark.core
@pytest.mark.parametrize("name", CHAINS)
def test_ranks_read_the_batches_of_one_device(name: str) -> None:
    make, moved, says = CHAINS[name]
    for size, shares in [(3, (5, 0, 3)), (2, ())][: 1 + (name in IN_HALVES)]:
        for dataset in same_batches(make, size, shares):
            assert (dataset._own.moved if dataset._own else -1) == moved
            assert says in dataset.report


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lengths().ragged_batch(4), "to_tensor(shape=...)"),
        (lambda: samples(9).map(lambda s: tf.sparse.from_dense(s["x"])).batch(4), "tf.sparse.to_dense"),
        (lambda: samples(9).map(lambda s: (s["x"], tf.as_string(s["y"]))).batch(4), "StringLookup"),
    ],
)
def test_what_has_no_rows_is_named(make: Make, says: str) -> None:
    for dataset in of_ranks(make, 2):
        assert dataset.report.startswith("every rank reads all rows and keeps its own: the dataset's batches hold")
        assert says in dataset.report


@pytest.mark.parametrize(
    ("given", "says", "action"),
    [
        (np.ones((6, 2)), "ndarray float64[6, 2]", "from_tensor_slices(x).batch(n)"),
        ((np.ones((6, 2)), np.ones(6)), "tuple", "from_tensor_slices((x, y)).batch(n)"),
        (tf.ones([6]), "float32[6]", "from_tensor_slices(x).batch(n)"),
        ((n for n in range(4)), "generator", "from_generator"),
        (iter(tf.data.Dataset.range(4)), "OwnedIterator", "wh.shard(dataset)"),
    ],
)
def test_what_is_no_dataset_is_refused(ranks: Callable[..., None], given: Any, says: str, action: str) -> None:
    ranks(2)
    with pytest.raises(ProgramError, match=r"wh\.shard takes a tf\.data dataset") as caught:
        wh.shard(given)
    assert says in caught.value.facts["given"]
    assert action in str(caught.value.action)


def test_a_dataset_is_not_shared_out_twice(ranks: Callable[..., None]) -> None:
    ranks(2)
    with pytest.raises(ProgramError, match=r"wh\.shard takes a tf\.data dataset"):
        wh.shard(wh.shard(tf.data.Dataset.range(4).batch(2)))  # type: ignore[arg-type]


def test_shuffles_without_a_seed_are_equal_on_all_ranks() -> None:
    def make() -> tf.data.Dataset:
        return samples(21).map(double).shuffle(21).batch(8)

    ranks, seen = of_ranks(make, 2), []
    for _ in range(2):
        parts = list(zip(*ranks))
        epoch = np.concatenate([joined([a["y"], b["y"]]) for a, b in parts])
        assert sorted(epoch) == list(range(21))
        seen.append(list(epoch))
    assert seen[0] != seen[1] != sorted(seen[1])


@pytest.mark.parametrize("shares", [(4, 4), (6, 2), (0, 8)])
def test_a_rank_transforms_its_samples_only(shares: tuple[int, ...]) -> None:
    counts = [0, 0]

    def make(rank: int) -> tf.data.Dataset:
        def costly(y: np.ndarray) -> np.ndarray:
            counts[rank] += 1
            return y

        def counted(sample: Any) -> Any:
            y = tf.numpy_function(costly, [sample["y"]], tf.int64, stateful=False)
            return {"x": sample["x"], "y": tf.ensure_shape(y, [])}

        return samples(21).map(counted).shuffle(5, seed=1).batch(8)

    made = iter(range(2))
    for dataset in of_ranks(lambda: make(next(made)), 2, shares):
        assert len(list(dataset)) == 3
    rest = {(4, 4): (3, 2), (6, 2): (4, 1), (0, 8): (0, 5)}[shares]
    assert counts == [2 * full + last for full, last in zip(shares, rest)]


@pytest.mark.parametrize("asked", [None, 3])
def test_functions_of_the_dataset_do_not_queue_behind_the_kernels_of_a_step(asked: int | None) -> None:
    options = tf.data.Options()
    if asked is not None:
        options.threading.private_threadpool_size = asked
    context = _Rank(0, 1, [], Config(environment={}), has_other_processes=False)
    shared = ShardedDataset(samples(8).map(double).batch(4).with_options(options), context, "row")
    found = shared._read.options()
    assert found.threading.private_threadpool_size == (asked or 1)
    # TensorFlow's tuning thread wakes up late when an iterator ends, which then waits, and all ranks with it.
    assert found.autotune.enabled is (None if asked else False)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_queue_is_bounded(prefetch: int) -> None:
    import time

    made: list[int] = []

    def count(y: np.ndarray) -> np.ndarray:
        made.append(int(y))
        return y

    source = tf.data.Dataset.range(200).map(lambda y: tf.numpy_function(count, [y], tf.int64)).batch(2)
    # The stages that tf.data adds by itself hold one or two batches more, and not always as many.
    plain = tf.data.Options()
    plain.experimental_optimization.apply_default_optimizations = False
    source = source.with_options(plain)
    config = Config({"batch.prefetch": prefetch}, environment={})
    context = _Rank(0, 1, [], config, has_other_processes=False)
    for taken, _ in enumerate(ShardedDataset(source, context, "row"), 1):
        deadline_s = time.monotonic() + 60
        while len(made) < 2 * (taken + prefetch) and time.monotonic() < deadline_s:
            time.sleep(0.002)
        time.sleep(0.02)
        assert len(made) == 2 * (taken + prefetch)
        if taken == 5:
            break


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: samples(9).shuffle(9).filter(odd).batch(4), "ShuffleDataset without a seed"),
        (lambda: samples(9).map(double, num_parallel_calls=2, deterministic=False).batch(4), "deterministic=False"),
        (
            lambda: samples(9).interleave(doubles, num_parallel_calls=2, deterministic=False).batch(4),
            "ParallelInterleaveDataset with deterministic=False",
        ),
        (
            lambda: samples(9).flat_map(lambda s: doubles(s).map(double, 2, deterministic=False)).batch(4),
            "FlatMapDataset of ParallelMapDatasetV2 with deterministic=False",
        ),
        (
            lambda: samples(9).interleave(lambda s: tf.data.Dataset.range(4).shuffle(4)).batch(4),
            "InterleaveDataset of ShuffleDatasetV3",
        ),
        (lambda: samples(9).filter(lambda s: tf.random.uniform([]) < 0.5).batch(4), "FilterDataset of RandomUniform"),
        (
            lambda: samples(9).filter(lambda s: truncated()[0] < 0.5).batch(4),
            "FilterDataset of ParameterizedTruncatedNormal",
        ),
    ],
)
def test_orders_that_would_differ_are_refused(make: Make, given: str) -> None:
    with pytest.raises(ProgramError, match="different orders") as caught:
        of_ranks(make, 2)
    assert given in caught.value.facts["given"]
    assert 'by="file"' in str(caught.value.action)


@pytest.mark.parametrize("calls", [None, 3, tf.data.AUTOTUNE])
def test_what_is_read_of_a_cache_of_shuffled_samples_follows_from_the_batches_taken(calls: int | None) -> None:
    """Counts what each rank reads, since whether the cache is full when a loop stops early decides the next order."""
    read: list[list[int]] = [[], []]

    def make(rank: int) -> tf.data.Dataset:
        def note(y: np.ndarray) -> np.ndarray:
            read[rank].append(int(y))
            return y

        numbers = tf.data.Dataset.range(60).map(lambda y: tf.numpy_function(note, [y], tf.int64))
        kept = numbers.map(lambda y: tf.ensure_shape(y, [])).shuffle(4, seed=5).cache()
        return kept.map(twice, num_parallel_calls=calls).batch(3, num_parallel_calls=calls).take(2)

    for _ in range(8):
        made = map(make, range(2))
        iterators = [iter(dataset) for dataset in of_ranks(made.__next__, 2)]
        for iterator in iterators:
            assert len(list(iterator)) == 2
        time.sleep(0.02)  # what reads ahead does it now
        # Two batches, and three samples that wait in the shuffle's buffer.
        assert [len(numbers) for numbers in read] == [9, 9]
        for numbers in read:
            numbers.clear()
