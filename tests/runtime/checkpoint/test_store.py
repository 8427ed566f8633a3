"""Checkpoints and exports in a store of objects, which has no folders, no links and renames by copying."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.checkpoints.model import Model, batch
from tests.checkpoints.store import list_keys, open_store
from tests.runtime.checkpoint.test_checkpoint import ZERO

Start = Callable[..., None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the objects of this process are kept."""
    folder = tmp_path_factory.mktemp("objects")
    open_store(folder)
    return folder


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_kept_replaced_and_read_by_plain_tensorflow(
    asynchronous: bool, ranks: Start, store: Path
) -> None:
    bucket = f"runs-{asynchronous}"
    folder = f"objects://{bucket}/gpt"
    ranks(2, **ZERO)
    model = Model(wh.function)
    manager = wh.CheckpointManager(model.checkpoint, f"{folder}/", 2, asynchronous=asynchronous)
    assert manager.restore_or_initialize() is None
    for number in (1, 7, 8, 7):  # a number that comes again
        model.step(*batch(number))
        manager.save(number)
    manager.wait()
    assert manager.checkpoints == [f"{folder}/ckpt-8", f"{folder}/ckpt-7"]
    assert tf.train.latest_checkpoint(folder) == f"{folder}/ckpt-7"
    files = [f"gpt/ckpt-{n}.{kind}" for n in (7, 8) for kind in ("data-00000-of-00002", "data-00001-of-00002", "index")]
    assert list_keys(store, bucket) == ["gpt/checkpoint", *files]  # nothing else is left
    wanted = model.values()
    model.step(*batch(9))
    tf.io.gfile.remove(f"{folder}/checkpoint")  # found by their files
    again = wh.CheckpointManager(model.checkpoint, folder, 2)
    assert again.restore_or_initialize() == f"{folder}/ckpt-8"
    again.restore(f"{folder}/ckpt-7")
    for value, whole in zip(model.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, whole)
    wh.shutdown()
    other = Model(tf.function)
    other.checkpoint.restore(f"{folder}/ckpt-7").expect_partial()
    for value, whole in zip(other.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, whole)


def test_what_a_killed_run_left_counts_for_nothing(ranks: Start, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "objects://killed/run"
    ranks(2)
    v = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(v=v)
    manager = wh.CheckpointManager(checkpoint, folder, 3)
    first = manager.save()
    for left in (
        ".writing-12/part-0.index",
        ".writing-12/begun",
        "ckpt-5.data-00000-of-00002",
        "other-5.data-00000-of-00002",
    ):
        with tf.io.gfile.GFile(f"{folder}/{left}", "w") as file:
            file.write("x")
    v.assign(2.0)

    def fail(**arguments: Any) -> None:
        raise tf.errors.UnavailableError(None, None, "503 slow down")

    with monkeypatch.context() as without:
        without.setattr(tf.raw_ops, "MergeV2Checkpoints", fail)
        with pytest.raises(wh.CheckpointError, match="503 slow down"):
            manager.save()
    assert manager.latest_checkpoint == first == tf.train.latest_checkpoint(folder)
    again = wh.CheckpointManager(checkpoint, folder, 3)
    assert again.restore_or_initialize() == first and float(v) == 1.0
    kept = ["checkpoint", "ckpt-1.data-00000-of-00001", "ckpt-1.index", "other-5.data-00000-of-00002"]
    assert list_keys(store, "killed") == [f"run/{name}" for name in kept]


def test_an_export_is_complete_when_its_last_file_comes(
    ranks: Start, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "objects://models/1"
    ranks(2)
    w = tf.Variable([[2.0], [3.0]])
    moved: list[str] = []
    original = tf.io.gfile.rename

    def watch(source: str, target: str, **options: Any) -> None:
        moved.append(target)
        original(source, target, **options)

    monkeypatch.setattr(tf.io.gfile, "rename", watch)
    for value in (6.0, 9.0):
        wh.export(wh.function(lambda x: tf.matmul(x, w)), place, tf.TensorSpec([None, 2]))
        w.assign(w * value)
    assert moved[-1] == f"{place}/saved_model.pb" and len(moved) >= 6
    assert {key.partition("/")[0] for key in list_keys(store, "models")} == {"1"}
    served = tf.saved_model.load(place).signatures["serving_default"]
    (result,) = served(tf.ones([1, 2])).values()
    assert result.numpy().item() == 30.0


def test_a_saver_of_version_1(ranks: Start, store: Path) -> None:
    ranks(2)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float64, [8, 4])
        with wh.split():
            w = tf.compat.v1.get_variable("w", [4, 64], tf.float64, use_resource=True)
            out = tf.tanh(x @ w)
        train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(out**2))
        start, saver = tf.compat.v1.global_variables_initializer(), tf.compat.v1.train.Saver()
    with wh.Session(graph=graph) as session:
        session.run(start)
        session.run(train, {x: np.ones((8, 4))})
        path = saver.save(session, "objects://v1/model", 1)
        wanted = session.run(w)
        with pytest.raises(wh.CheckpointError, match="could not be written"):
            with pytest.MonkeyPatch.context() as broken:
                broken.setattr(tf.raw_ops, "SaveV2", lambda **arguments: tf.io.gfile.remove("objects://v1/nothing"))
                saver.save(session, "objects://v1/model", 2)
    np.testing.assert_array_equal(tf.train.load_variable(path, "w"), wanted)
    assert not [key for key in list_keys(store, "v1") if "part" in key or "model-2" in key]


def test_a_store_that_tensorflow_does_not_know_is_named(ranks: Start) -> None:
    ranks(1)
    for act in (
        lambda: wh.CheckpointManager(tf.train.Checkpoint(), "s3://bucket/run", 2),
        lambda: wh.export(wh.function(lambda x: x), "s3://bucket/model", tf.TensorSpec([2])),
    ):
        with pytest.raises(wh.CheckpointError, match=r"no file system for s3://(.|\n)*import tensorflow_io"):
            act()
