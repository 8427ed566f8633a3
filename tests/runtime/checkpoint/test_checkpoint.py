"""Checkpoints by several ranks: shares, slices, what is kept, what is damaged, what is left over."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.checkpoints.matrix import continued, error, reference, save
from tests.checkpoints.model import Model, batch
from tests.draws import one_of

Start = Callable[..., None]
ZERO = {"memory.zero": 1, "memory.zero_min_bytes": 0}


def saved(folder: Path, **options: Any) -> tuple[Model, wh.CheckpointManager, str]:
    """A model after three steps, and its checkpoint."""
    model = Model(wh.function)
    for number in range(3):
        model.step(*batch(number))
    manager = wh.CheckpointManager(model.checkpoint, folder, 2, **options)
    path = manager.save()
    assert path is not None
    return model, manager, path


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """No file may become larger: writing fails as it does on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def sizes(path: str) -> list[int]:
    return [p.stat().st_size for p in sorted(Path(path).parent.glob(f"{Path(path).name}.data-*"))]


@pytest.mark.core
def test_every_rank_writes_its_share_and_plain_tensorflow_reads_it(ranks: Start, tmp_path: Path) -> None:
    ranks(3, **ZERO)
    model, _, path = saved(tmp_path)
    written = sizes(path)
    assert len(written) == 3 and max(written[1:]) - min(written[1:]) < 0.2 * written[1], written
    wanted = model.values()
    assert sum(written[1:]) < sum(v.nbytes for v in wanted) < sum(written)  # nothing is written twice
    wh.shutdown()
    other = Model(tf.function)
    other.checkpoint.restore(path).assert_consumed()
    for value, whole in zip(other.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, whole)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", *(p.name for p in sorted(tmp_path.glob("ckpt-1.*")))]


def test_parts_are_read_by_slices(ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(2, **ZERO)
    model, manager, path = saved(tmp_path)
    wanted = model.values()
    model.step(*batch(5))
    asked: list[str] = []
    original = tf.raw_ops.RestoreV2

    def watched(**arguments: Any) -> Any:
        asked.extend(arguments["shape_and_slices"])
        return original(**arguments)

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", watched)
    assert manager.restore_or_initialize() == path
    assert len(asked) >= 8 and all(":" in spec or " " in spec for spec in asked), asked
    for value, whole in zip(model.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, whole)


def test_random_states_go_on(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    tf.random.set_global_generator(tf.random.Generator.from_seed(4))
    _, manager, _ = saved(tmp_path)

    def drawn() -> list[float]:
        return [random.random(), np.random.random(), float(tf.random.get_global_generator().uniform(()))]

    wanted = drawn()
    assert drawn() != wanted
    manager.restore_or_initialize()
    assert drawn() == wanted


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_kept(ranks: Start, tmp_path: Path, asynchronous: bool) -> None:
    ranks(2)
    model, manager, _ = saved(tmp_path, asynchronous=asynchronous)
    for number in (7, 8, 7):  # a number that comes again
        model.step(*batch(number))
        manager.save(number)
    manager.wait()
    wanted = [str(tmp_path / f"ckpt-{n}") for n in (8, 7)]
    assert manager.checkpoints == wanted and manager.latest_checkpoint == wanted[1]
    assert tf.train.latest_checkpoint(tmp_path) == wanted[1]
    assert {p.name.partition(".")[0] for p in tmp_path.iterdir()} == {"checkpoint", "ckpt-8", "ckpt-7"}
    assert not list(tmp_path.glob("*replaced*"))
    again = wh.CheckpointManager(model.checkpoint, tmp_path, 2)
    assert again.checkpoints == wanted
    values = model.values()
    model.step(*batch(9))
    again.restore_or_initialize()
    for value, whole in zip(model.values(), values, strict=True):
        np.testing.assert_array_equal(value, whole)


def test_a_snapshot_is_of_the_moment_of_saving(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **ZERO)
    model, manager, _ = saved(tmp_path, asynchronous=True)
    wanted = model.values()
    path = manager.save()
    for number in range(5):
        model.step(*batch(number))  # while threads write
    wh.shutdown()  # waits for them
    other = Model(tf.function)
    other.checkpoint.restore(path).expect_partial()
    for value, whole in zip(other.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, whole)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(ranks: Start, tmp_path: Path, asynchronous: bool) -> None:
    ranks(2)
    model, manager, path = saved(tmp_path, asynchronous=asynchronous)
    manager.wait()

    with file_limit(4_000), pytest.raises(wh.CheckpointError, match="File too large"):
        manager.save()
        manager.wait()
    assert manager.latest_checkpoint == path == tf.train.latest_checkpoint(tmp_path)
    assert not list(tmp_path.glob(".writing*"))
    model.step(*batch(0))
    assert manager.save() == str(tmp_path / "ckpt-3")


def test_damage_is_found_and_named(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **ZERO)
    _, manager, path = saved(tmp_path)
    shard = Path(f"{path}.data-00001-of-00002")
    whole = shard.read_bytes()
    generator = random.Random(0)
    for place in generator.sample(range(len(whole)), 6):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        shard.write_bytes(damaged)
        with pytest.raises(wh.CheckpointError, match="a checkpoint is damaged") as caught:
            manager.restore(path)
        assert shard.name in str(caught.value), caught.value
        assert "VARIABLE_VALUE" in str(caught.value), caught.value
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(wh.CheckpointError, match=r"data-00001"):
        manager.restore(path)
    shard.write_bytes(whole)
    index = Path(f"{path}.index")
    entries = index.read_bytes()
    for place in generator.sample(range(len(entries) - 100), 3):  # behind them lies what nobody reads
        damaged = bytearray(entries)
        damaged[place] ^= 1 << generator.randrange(8)
        index.write_bytes(damaged)
        with pytest.raises(wh.CheckpointError, match=r"ckpt-\d+\.index"):
            manager.restore(path)
    index.write_bytes(entries)
    manager.restore(path)
    with pytest.raises(wh.CheckpointError, match="cannot be read"):
        manager.restore(str(tmp_path / "ckpt-99"))


def test_left_overs_go(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    (tmp_path / ".writing-12").mkdir()
    (tmp_path / ".writing-12" / "part-0.index").touch()
    (tmp_path / "ckpt-5.data-00000-of-00002").touch()  # its index did not come
    (tmp_path / "other-5.data-00000-of-00002").touch()
    _, manager, path = saved(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert "other-5.data-00000-of-00002" in names and not any("writing" in n or "ckpt-5" in n for n in names), names
    assert manager.checkpoints == [path]


def test_intervals_and_first_values(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    step = tf.Variable(0, dtype=tf.int64)
    called = []
    manager = wh.CheckpointManager(
        tf.train.Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=3,
        init_fn=lambda: called.append(1),
    )  # fmt: skip
    assert manager.restore_or_initialize() is None and called == [1]
    saved_at = []
    for _ in range(8):
        step.assign_add(1)
        if manager.save(step) is not None:
            saved_at.append(int(step))
    assert saved_at == [1, 4, 7] and len(manager.checkpoints) == 3
    assert manager.save(check_interval=False) is not None
    assert manager.save(check_interval=False) is None
    with pytest.raises(wh.CheckpointError, match=r"not a tf.train.Checkpoint(.|\n)*given: an object of type dict"):
        wh.CheckpointManager({"w": tf.Variable(0.0)}, str(tmp_path), max_to_keep=2)
    with pytest.raises(ValueError, match="max_to_keep"):
        wh.CheckpointManager(tf.train.Checkpoint(step=step), tmp_path, 0)


def test_a_saver_of_version_1(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float64, [8, 4])
        with wh.split():
            w = tf.compat.v1.get_variable("w", [4, 64], tf.float64, use_resource=True)
            v = tf.compat.v1.get_variable("v", [64, 6], tf.float64, use_resource=True)
            out = tf.tanh(x @ w) @ v
        train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(out**2))
        start = tf.compat.v1.global_variables_initializer()
        saver = tf.compat.v1.train.Saver()
        variables = tf.compat.v1.global_variables()
    feed = {x: np.random.default_rng(0).normal(size=(8, 4))}
    with wh.Session(graph=graph) as session:
        session.run(start)
        session.run(train, feed)
        path = saver.save(session, str(tmp_path / "model"), 1)
        wanted = session.run(variables)
        with file_limit(2_000), pytest.raises(wh.CheckpointError, match="could not be written"):
            saver.save(session, str(tmp_path / "model"), 2)
        session.run(train, feed)
    with tf.compat.v1.Session(graph=graph) as session:
        saver.restore(session, path)
        for value, whole in zip(session.run(variables), wanted, strict=True):
            np.testing.assert_array_equal(value, whole)


@pytest.mark.parametrize(
    ("saver", "loader"),
    one_of(2, [("2x2 split", "ZeRO-2 of 3"), ("DP 3 uneven", "split 2"), ("split 2", "ZeRO-3 of 2")], several=True),
)
def test_a_checkpoint_is_continued_under_another_plan(saver: str, loader: str, tmp_path: Path) -> None:
    wanted = reference()
    for values in continued(loader, save(saver, tmp_path)):
        assert error(values, wanted) < 1e-10


def test_the_position_in_a_dataset(ranks: Start, tmp_path: Path) -> None:
    ranks(2)

    def numbers(seed: int | None = 4) -> Any:
        return wh.shard(tf.data.Dataset.range(20).shuffle(20, seed=seed).batch(3))

    dataset = numbers()
    epochs = [[list(map(int, b)) for b in dataset] for _ in range(2)]
    assert epochs[0] != epochs[1]
    dataset = numbers()
    list(dataset)
    iterator = iter(dataset)
    before = [list(map(int, next(iterator))) for _ in range(4)]
    assert before == epochs[1][:4]
    checkpoint = tf.train.Checkpoint(data=iterator)
    path = wh.CheckpointManager(checkpoint, tmp_path, 1).save()
    assert [list(map(int, b)) for b in iterator] == epochs[1][4:]
    again = iter(numbers())  # as a run that is started again makes it
    manager = wh.CheckpointManager(tf.train.Checkpoint(data=again), tmp_path, 1)
    manager.restore(path).assert_consumed()
    assert [list(map(int, b)) for b in again] == epochs[1][4:]
    free = wh.CheckpointManager(tf.train.Checkpoint(data=iter(numbers(None))), tmp_path, 1)
    with pytest.raises(wh.ProgramError, match="a shuffle without a seed"):
        free.save()


@pytest.mark.parametrize("cached", [False, True], ids=["shuffle", "cache"])
def test_restoring_an_earlier_order_is_as_in_one_process(ranks: Start, tmp_path: Path, cached: bool) -> None:
    """An iterator of tf.data that goes back to an earlier order, and the orders that come after it."""

    def orders(share: Callable[[tf.data.Dataset], Any], folder: Path) -> list[list[list[int]]]:
        def rest(batches: Any) -> list[list[int]]:
            return [list(map(int, batch)) for batch in batches]

        shuffled = tf.data.Dataset.range(20).shuffle(20, seed=4)
        dataset = share((shuffled.cache() if cached else shuffled).batch(3))
        found = [rest(dataset)]
        iterator = iter(dataset)
        found += [[list(map(int, next(iterator)))] for _ in range(4)]
        checkpoint = tf.train.Checkpoint(data=iterator)
        path = checkpoint.write(str(folder / "saved"))
        found += [rest(iterator), rest(dataset)]
        for _ in range(2):  # later orders have begun, and been read
            checkpoint.read(path).assert_consumed()
            found += [rest(iterator), rest(dataset)]
        return found

    def certain(found: list[list[list[int]]]) -> list[list[list[int]]]:
        """Leaves out what one process reads by timing: the order that TensorFlow begins behind a restored one."""
        return found if cached else [*found[:8], found[9]]

    wanted = orders(lambda dataset: dataset, tmp_path)
    assert (wanted[0] == wanted[-1]) == cached
    ranks(2)
    found = orders(wh.shard, tmp_path)
    assert certain(found) == certain(wanted)
    assert found[8] == found[10]


def test_an_earlier_order_that_nobody_knows_is_refused(
    ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds behind large arrays are not looked up; a cache may hold another order than the one that is restored."""
    ranks(2)
    monkeypatch.setattr("whale.runtime.input.shuffle_orders._LARGEST_BYTES", 0)

    def numbers(cached: bool) -> tf.data.Dataset:
        source = tf.data.Dataset.range(20) if cached else tf.data.Dataset.from_tensor_slices(np.arange(20))
        shuffled = source.shuffle(20, seed=4)
        return (shuffled.cache() if cached else shuffled).batch(3)

    for cached in (False, True):
        dataset = wh.shard(numbers(cached))
        iterator = iter(dataset)
        next(iterator)
        checkpoint = tf.train.Checkpoint(data=iterator)
        path = checkpoint.write(str(tmp_path / f"saved_{cached}"))
        list(dataset)
        checkpoint.read(path)
        with pytest.raises(wh.ProgramError, match="earlier order of its shuffle"):
            next(iterator)


@pytest.mark.parametrize("at_once", [False, True], ids=["partly before", "two at once"])
def test_a_cache_that_two_iterations_have_filled_is_not_saved(ranks: Start, tmp_path: Path, at_once: bool) -> None:
    """Refuses it where two iterations begin before it is full: nobody knows later whose order it has."""
    ranks(2)

    def make() -> tf.data.Dataset:
        numbers = np.where(np.arange(20) == 3, np.nan, np.arange(20.0))
        return tf.data.Dataset.from_tensor_slices(numbers).shuffle(20, seed=4).cache()

    def rest(batches: Any) -> list[list[float]]:
        return [np.nan_to_num(batch, nan=-1.0).tolist() for batch in batches]

    dataset = make()
    first = tf.data.Dataset.sample_from_datasets([dataset, dataset.take(2)], seed=6) if at_once else dataset.take(2)
    list(wh.shard(first.batch(3)))
    filled = rest(wh.shard(dataset.batch(3)))
    iterator = iter(wh.shard(dataset.batch(3)))
    next(iterator)
    checkpoint = tf.train.Checkpoint(data=iterator)
    if at_once:
        with pytest.raises(wh.ProgramError, match="which two iterations at once have filled"):
            checkpoint.write(str(tmp_path / "saved"))
        return
    path = checkpoint.write(str(tmp_path / "saved"))
    again = iter(wh.shard(make().batch(3)))
    tf.train.Checkpoint(data=again).read(path).assert_consumed()
    assert rest(again) == filled[1:] and rest(iterator) == filled[1:]


def test_weights_that_tensorflow_does_not_see_are_named(
    ranks: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras 3 does not tell tf.train.Checkpoint of layers in a list, Keras 2 does."""

    class Towers(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.towers = [tf.keras.layers.Dense(1, name=f"tower_{i}") for i in range(2)]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.add_n([tower(x) for tower in self.towers])

    ranks(2)
    model = Towers()
    model(tf.ones((1, 3)))
    hidden, named = tf.train.Checkpoint(model=model), tf.train.Checkpoint(model=model, layers=list(model.layers))
    for checkpoint, missing in ((named, False), (hidden, tf.__version__ >= "2.16")):
        manager = wh.CheckpointManager(checkpoint, tmp_path / str(missing), 1)
        manager.save()
        path = manager.save()  # which says nothing more
        assert capsys.readouterr().err.count("4 weights of a model are not in the checkpoint") == missing
        sizes = [shape for name, shape in tf.train.list_variables(path) if shape == [3, 1]]
        assert len(sizes) == (0 if missing else 2)
