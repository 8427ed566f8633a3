"""Ranks whose scripts make different datasets are told so, with what differs and a likely cause; others read on."""

from __future__ import annotations

import itertools
import os
import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_ops
from whale.capture.sharded import ShardedTensor
from whale.config import Config, Mesh
from whale.errors import ProgramError
from whale.runtime.input.data import ShardedDataset
from whale.runtime.input.equal_datasets import Summary
from whale.runtime.input.equal_inputs import compare_arguments, number_tables

Make = Callable[[int], tf.data.Dataset]  # of a rank
WORDS = [f"word{i}" for i in range(9)]
_numbers = itertools.count()


@dataclass
class Rank:
    """Stands for the context that a dataset and a step's comparison ask."""

    rank: int
    comms: list[Any]
    other_hashes: tuple[int, ...] = ()
    config: Config = field(default_factory=lambda: Config({"debug.check_inputs": 4}, environment={}))
    size: int = 2
    elements: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    rank_order: tuple[int, ...] = ()
    rounds_otherwise: bool = False
    has_other_processes: bool = True
    has_local_batch: bool = False
    trace: None = None
    elastic: None = None
    seeds: None = None
    dry: None = None
    lost_count: int = 0

    @staticmethod
    def retry_after_loss(call: Callable[[], Any]) -> Any:
        return call()


def train(make: Make, epochs: int = 1, batches: int | None = None, other_hashes: tuple[int, ...] = ()) -> list[str]:
    """Trains on two ranks' datasets; returns the facts of the error that they get, or "" where there is none."""
    comms = whale_ops.connect_in_process(f"equal_datasets{next(_numbers)}", 2)

    def of_rank(rank: int) -> str:
        context: Any = Rank(rank, [comms[rank]], other_hashes)
        try:
            dataset = ShardedDataset(make(rank), context, "row", told=False)
            leaves = len(tf.nest.flatten(dataset.element_spec))
            names = [f"input{i}" for i in range(leaves)]
            step = compare_arguments(lambda tensors: None, context, "step", names, names, {})
            for _ in range(epochs):
                for element in itertools.islice(dataset, batches):
                    flat = tf.nest.flatten(element)
                    step([t.local if type(t) is ShardedTensor else t for t in flat])
        except ProgramError as error:
            return f"{error.message}: " + "; ".join(f"{name}: {fact}" for name, fact in error.facts.items())
        return ""

    try:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(of_rank, (0, 1)))
    finally:
        for comm in comms:
            comm.leave()


def samples(x: Any = None, y: Any = None) -> tf.data.Dataset:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(16, 3)) if x is None else x
    return tf.data.Dataset.from_tensor_slices((rows, np.arange(16) if y is None else y))


def generator(of: Callable[[], Any], count: int | None = None) -> tf.data.Dataset:
    def rows() -> Any:
        for row in of():
            yield np.asarray(row, np.float64), 1

    spec = tf.TensorSpec([3], tf.float64), tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec)
    return dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))


def text() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.random.default_rng(0).choice(WORDS, size=(16, 5)), np.arange(16)))


def looked_up(words: list[str]) -> tf.data.Dataset:
    table = keras.layers.StringLookup(vocabulary=words)
    return text().map(lambda t, y: (table(t), y)).batch(4)


def in_order(rank: int) -> list[str]:
    """The order of a set of text, as each process has another one."""
    return random.Random(rank).sample(WORDS, len(WORDS))


def static_table(words: list[str]) -> tf.lookup.StaticHashTable:
    numbers = tf.range(len(words), dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.constant(words), numbers), -1)


def mapped(dataset: tf.data.Dataset, held: Any, use: Callable[..., Any]) -> tf.data.Dataset:
    """Batches of what a function makes of samples, and of what it has captured."""
    return dataset.map(lambda x, y: (use(held, x, y), y)).batch(4)


def filled_in_order(words: list[str]) -> tf.lookup.StaticHashTable:
    numbers = tf.constant([WORDS.index(w) for w in words], tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.constant(words), numbers), -1)


def vectorized(words: list[str]) -> tf.data.Dataset:
    layer = keras.layers.TextVectorization(vocabulary=words)
    lines = tf.data.Dataset.from_tensor_slices((["word1 word2 word3"] * 8, np.arange(8)))
    return lines.batch(4).map(lambda t, y: (layer(t), y))


def from_python(rank: int) -> tf.data.Dataset:
    def read(n: np.ndarray) -> np.ndarray:
        return np.int64(n + rank)

    return samples().map(lambda x, y: (x, tf.ensure_shape(tf.numpy_function(read, [y], tf.int64), []))).batch(4)


def listed(rank: int) -> tf.data.Dataset:
    names = [f"/data/part{i}" for i in range(16)]
    order = names if not rank else names[8:] + names[:8]
    files = tf.data.Dataset.from_tensor_slices(order)
    return files.map(lambda name: tf.strings.to_number(tf.strings.substr(name, 10, 2))).batch(4)


def scaled(factor: float) -> tf.data.Dataset:
    return samples().map(lambda x, y: (x * factor, y)).batch(4)


UNSEEDED = "random numbers or uuids drawn before wh.init()"
ORDER = "in another order"
# What ranks make for themselves -> what each rank does; what the error names; the cause that it tells of.
DIFFERENT: dict[str, tuple[Make, str, str]] = {
    "words numbered in a set's order": (
        lambda rank: samples(y=[{w: i for i, w in enumerate(in_order(rank))}[w] for w in (WORDS * 2)[:16]]).batch(4),
        "tensors[1] of TensorSliceDataset", ""),
    "a vocabulary in a set's order": (lambda rank: looked_up(in_order(rank)), "entries of the table", ""),
    "another vocabulary": (lambda rank: looked_up([*WORDS[:5], f"by rank {rank}"]), "keys of the table", UNSEEDED),
    "words that are split up": (lambda rank: vectorized(in_order(rank)), "entries of the table", ""),
    "a table in a set's order": (
        lambda rank: mapped(text(), static_table(in_order(rank)), lambda table, t, y: table.lookup(t)),
        "entries of the table", ""),
    "rows in a set's order": (
        lambda rank: samples(y=np.random.default_rng(rank).permutation(16)).batch(4), "tensors[1]", ORDER),
    "numbers drawn before wh.init()": (
        lambda rank: samples(np.random.default_rng(rank).normal(size=(16, 3))).batch(4), "tensors[0]", UNSEEDED),
    "random.Random()": (lambda rank: samples(y=[random.Random().random() for _ in range(16)]).batch(4),
                        "tensors[1]", UNSEEDED),
    "numbers of uuid": (lambda rank: samples(y=[uuid.uuid4().int % 9973 for _ in range(16)]).batch(4),
                        "tensors[1]", "uuid"),
    "text of uuid": (lambda rank: looked_up([uuid.uuid4().hex]), "keys of the table", "uuid"),
    "a constant of a function": (lambda rank: scaled(random.SystemRandom().random()), "constant", "the time"),
    "the process id as a seed": (lambda rank: samples().shuffle(16, seed=os.getpid() + rank).batch(4),
                                 "seed2 of ShuffleDataset", "os.getpid()"),
    "a captured tensor": (
        lambda rank: mapped(samples(), tf.constant(np.full(5000, rank)), lambda held, x, y: held[y]),
        "captured tensor 0", "the time"),
    "a captured variable": (
        lambda rank: mapped(samples(), tf.Variable(1.0 + rank, dtype=tf.float64), lambda held, x, y: x * held),
        "the captured variable", "the time"),
    "files in another order": (listed, "tensors[0] of TensorSliceDataset", "os.listdir or glob without sorted()"),
    "another function": (
        lambda rank: samples().map((lambda x, y: (x + 1, y)) if rank else (lambda x, y: (x, y + 1))).batch(4),
        "the operations of `<lambda>` in MapDataset", ""),
    "another step of the pipeline": (
        lambda rank: (samples().shuffle(8, seed=1) if rank else samples()).repeat(1).batch(4), "the kind of", ""),
    "another size of a shuffle": (lambda rank: samples().shuffle(8 + rank, seed=1).batch(4), "buffer_size", ""),
    "a generator": (
        lambda rank: generator(lambda: np.random.default_rng(rank).normal(size=(16, 3))).batch(4), "input0", UNSEEDED),
    "a generator's order": (
        lambda rank: generator(lambda: np.eye(16, 3)[random.Random(rank).sample(range(16), 16)]).batch(4),
        "input0", ""),
    "a generator of known length": (
        lambda rank: generator(lambda: np.random.default_rng(rank).normal(size=(16, 3)), 16).batch(4), "input0", ""),
    "a generator that differs later": (
        lambda rank: generator(lambda: [[0.0] * 3] * 100 + [[float(rank)] * 3] * 100).batch(4), "call 28", ""),
    "a known one that differs later": (
        lambda rank: generator(lambda: [[0.0] * 3] * 100 + [[float(rank)] * 3] * 100, 200).batch(4), "call 28", ""),
    "one of two generators": (
        lambda rank: tf.data.Dataset.zip((
            generator(lambda: np.eye(16, 3)).batch(4, True), generator(lambda: np.eye(16, 3) * rank).batch(4, True))),
        "input2", ""),
    "one generator behind another": (
        lambda rank: generator(lambda: np.eye(8, 3)).batch(4).concatenate(
            generator(lambda: np.eye(8, 3) * rank).batch(4)), "call 2", ""),
    "a function of Python": (from_python, "input1", ""),
    "batches from Python": (lambda rank: from_python(rank).map(lambda x, y: (x, y)), "input1", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_hear_what_they_make_differently(what: str) -> None:
    make, name, cause = DIFFERENT[what]
    said = train(make)
    for one in said:
        assert one.startswith(("the ranks pass different datasets to wh.shard", "the ranks read different batches")), (
            said
        )
        assert name in one, said
        assert "ranks 0 and 1" in one
        assert cause in one, said
    assert said[0] == said[1]


def test_hashes_are_named_where_they_differ() -> None:
    for one in train(lambda rank: looked_up(in_order(rank)), other_hashes=(1,)):
        assert "likely cause: Python's string hashes differ between these ranks" in one
        assert "PYTHONHASHSEED=0" in one


def augmented(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x + tf.random.uniform([3], dtype=tf.float64), y


def in_python(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    def disturbed(row: np.ndarray) -> np.ndarray:
        return row + np.random.default_rng().normal(size=3)

    return tf.ensure_shape(tf.numpy_function(disturbed, [x], tf.float64), [3]), y


def by_a_generator(dataset: tf.data.Dataset) -> tf.data.Dataset:
    draw = tf.random.Generator.from_non_deterministic_state()
    return dataset.map(lambda x, y: (x + draw.uniform([3], dtype=tf.float64), y))


def with_layer_names(rank: int) -> tf.data.Dataset:
    for _ in range(rank):
        keras.layers.StringLookup(vocabulary=WORDS)
        tf.function(lambda x: x + 1)(1)
    return looked_up(WORDS)


def of_files(rank: int, folder: Path) -> tf.data.Dataset:
    (folder / str(rank)).mkdir(exist_ok=True)
    for i in range(2):
        (folder / str(rank) / f"{i}.txt").write_text("".join(f"{n}\n" for n in range(8)))
    names = [str(folder / str(rank) / f"{i}.txt") for i in range(2)]
    return tf.data.TextLineDataset(names).map(tf.strings.to_number).cache(str(folder / str(rank) / "kept")).batch(4)


EQUAL: dict[str, Callable[[int, Path], tf.data.Dataset]] = {
    "the same": lambda rank, _: samples().shuffle(8, seed=2).map(lambda x, y: (2 * x, y)).repeat(2).batch(4),
    "a shuffle without a seed": lambda rank, _: samples().shuffle(8).batch(4),
    "the same table": lambda rank, _: looked_up(WORDS),
    "a table filled in another order": lambda rank, _: mapped(
        text(), filled_in_order(in_order(rank)), lambda table, t, y: table.lookup(t)),
    "maps of drawn numbers": lambda rank, _: samples().map(augmented).batch(4),
    "drawn after a generator": lambda rank, _: generator(lambda: np.eye(16, 3)).map(augmented).batch(4),
    "drawn in Python": lambda rank, _: samples().map(in_python).batch(4),
    "drawn in Python, in parallel": lambda rank, _: samples().map(in_python, num_parallel_calls=2).batch(4),
    "drawn by a generator of numbers": lambda rank, _: by_a_generator(generator(lambda: np.eye(16, 3), 16)).batch(4),
    "a layer that draws": lambda rank, _: mapped(
        samples(), keras.layers.GaussianNoise(0.5, seed=rank), lambda layer, x, y: layer(x, training=True)),
    "other names": lambda rank, _: with_layer_names(rank),
    "other folders": of_files,
    "threads": lambda rank, _: samples().map(
        lambda x, y: (x, y), num_parallel_calls=1 + rank).batch(4).prefetch(1 + rank),
    "rounding": lambda rank, _: samples(np.random.default_rng(0).normal(size=(16, 3)) * (1 + rank * 1e-15)).batch(4),
    "rounding in batches of which the number is known": lambda rank, _: generator(
        lambda: np.eye(16, 3) * (1 + rank * 1e-15), 16).batch(4),
    "rounding in batches": lambda rank, _: generator(lambda: np.eye(16, 3) * (1 + rank * 1e-15)).batch(4),
    "a generator": lambda rank, _: generator(lambda: np.eye(16, 3)).batch(4),
    "a generator of known length": lambda rank, _: generator(lambda: np.eye(16, 3), 16).shuffle(4, seed=1).batch(4),
}  # fmt: skip


@pytest.mark.parametrize("what", EQUAL)
def test_what_does_not_matter_is_let_pass(what: str, tmp_path: Path) -> None:
    assert train(lambda rank: EQUAL[what](rank, tmp_path), epochs=3) == ["", ""]


def test_rounds_that_are_read_ahead_are_told_apart() -> None:
    """One batch makes a round of a repetition; the next round's has been read before this one's is looked at."""
    summary = Summary([0], 4)
    summary.begin()
    for sums in (7, 8, 9):
        summary._keep(np.int64(0), np.array([sums]))
    assert [[t.numpy().tolist() for t in summary.find(0)] for _ in range(3)] == [[[7]], [[8]], [[9]]]
    summary.end()
    summary.begin()
    for sums in (7, 8, 9):  # of each round, the first batch is left out behind batch(n)
        summary._keep(np.int64(0), np.array([0]))
        summary._keep(np.int64(1), np.array([sums]))
    assert [[t.numpy().tolist() for t in summary.find(1)] for _ in range(3)] == [[[7]], [[8]], [[9]]]


def test_only_what_is_to_come_is_kept() -> None:
    summary = Summary([0], 4)
    summary.begin()
    for number in range(20):
        if number < 3 or number % 4 == 0:
            summary._keep(np.int64(number), np.array([number]))
        assert [t.numpy().tolist() for t in summary.find(number)] == [
            [number if number < 3 else max(2, number // 4 * 4)]
        ]
        assert len(summary._held) == 1


def test_two_iterations_at_once_are_no_difference() -> None:
    kept: list[Any] = []

    def make(rank: int) -> tf.data.Dataset:
        return generator(lambda: np.eye(16, 3), 16).map(lambda x, y: (x, y)).batch(4)

    def of_rank(rank: int, comms: Any) -> None:
        dataset = ShardedDataset(make(rank), Rank(rank, [comms[rank]]), "row", told=False)  # type: ignore[arg-type]
        kept.append(len([1 for _ in zip(dataset, dataset)]))
        assert dataset._own is not None
        assert [summary.find(0) for summary in dataset._own.summaries] == [[]]

    comms = whale_ops.connect_in_process(f"equal_datasets{next(_numbers)}", 2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: of_rank(rank, comms), (0, 1)))
    for comm in comms:
        comm.leave()
    assert kept == [4, 4]


def test_tables_of_all_kinds_are_read() -> None:
    mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, [0.0, 0.0])
    dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, 0, -2)
    tables = [static_table(WORDS), mutable, dense, keras.layers.IntegerLookup(vocabulary=[4, 2]).lookup_table]
    handles = {f"{i}/table_handle": table.resource_handle for i, table in enumerate(tables)}
    empty = number_tables(handles)
    mutable.insert(["a", "b"], [[1.0, 2.0], [3.0, 4.0]])
    dense.insert([5, 3], [7, 8])
    filled = number_tables(handles)
    changed = {name for name in filled if int(filled[name]) != int(empty[name])}
    assert {name.rpartition(" ")[2] for name in changed} == {"`1`", "`2`"}
    assert len(filled) == 8
    mutable.insert(["a"], [[1.0, 2.5]])
    assert {n for n, v in number_tables(handles).items() if int(v) != int(filled[n])} == {"entries of the table `1`"}
    assert not number_tables({"a variable": tf.Variable(1.0).handle, "numbers": tf.constant(1)})
