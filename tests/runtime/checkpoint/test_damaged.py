"""Damaged checkpoints and state files: named, passed over if asked to, and never a start from nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.checkpoints import matrix
from tests.runtime.checkpoint.test_checkpoint import ZERO, saved
from whale.runtime.checkpoint import saving

Start = Callable[..., None]


def two(folder: Path) -> tuple[tf.Variable, tf.train.Checkpoint]:
    """A folder with ckpt-1 of ones and ckpt-2 of twos."""
    v = tf.Variable(tf.ones([4], tf.float64), name="v")
    checkpoint = tf.train.Checkpoint(v=v)
    manager = wh.CheckpointManager(checkpoint, folder, 3)
    manager.save()
    v.assign(2 * v)
    manager.save()
    v.assign(3 * v)
    return v, checkpoint


@pytest.mark.parametrize("what", ["truncated", "empty", "gone", "flipped", "index", "noise"])
def test_the_one_before_is_restored_if_asked_for(
    what: str, ranks: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2)
    v, checkpoint = two(tmp_path)
    data = next(tmp_path.glob("ckpt-2.data-*"))
    whole = data.read_bytes()
    if what == "gone":
        data.unlink()
    elif what == "index":
        (tmp_path / "ckpt-2.index").write_bytes(b"")
    else:
        changed = bytearray(whole)
        changed[3] ^= 1
        data.write_bytes(
            {"truncated": whole[:-9], "empty": b"", "flipped": bytes(changed), "noise": os.urandom(len(whole))}[what]
        )
    manager = wh.CheckpointManager(checkpoint, tmp_path, 3)
    with pytest.raises(wh.CheckpointError, match="ckpt-2") as error:
        manager.restore_or_initialize()
    if what not in ("index", "gone"):
        assert data.name in str(error.value) and "tensors: " in str(error.value)
    capsys.readouterr()
    assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-1")
    assert "ckpt-2 is damaged" in capsys.readouterr().err
    assert v.numpy().tolist() == [1.0] * 4
    next(tmp_path.glob("ckpt-1.data-*")).write_bytes(b"")
    with pytest.raises(wh.CheckpointError, match="all checkpoints are damaged"):
        manager.restore_or_initialize(fallback=True)


def test_under_another_plan_changed_bits_are_found_too(tmp_path: Path) -> None:
    """Parts of two ranks, read by three that have all of each, and by two that divide everything otherwise."""
    path, generator, found = matrix.save("split 2", tmp_path), random.Random(5), 0
    for loader in ("DP 3 uneven", "ZeRO-3 of 2"):
        with matrix.run(loader) as model:
            manager = wh.CheckpointManager(model.checkpoint, tmp_path, 1)
            manager.restore(path)
            wanted = model.values()
            for file in sorted(tmp_path.glob(f"{os.path.basename(path)}.*")):
                whole = file.read_bytes()
                for place in generator.sample(range(len(whole)), 4):
                    file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
                    try:
                        manager.restore(path)
                        assert all(map(np.array_equal, model.values(), wanted))
                    except wh.CheckpointError:
                        found += 1
                file.write_bytes(whole)
    assert found > 8


def test_every_change_of_a_bit_is_found_or_changes_nothing(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **ZERO)
    model, manager, path = saved(tmp_path)
    kept = [*model.weights, *model.optimizer.variables]
    values = [tf.convert_to_tensor(v).numpy().tobytes() for v in kept]
    generator, found = random.Random(3), 0
    for file in sorted(tmp_path.glob(f"{os.path.basename(path)}.*")):
        whole = file.read_bytes()
        for place in generator.sample(range(len(whole)), min(6, len(whole))):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << generator.randrange(8))]) + whole[place + 1 :])
            try:
                manager.restore(path)
                assert [tf.convert_to_tensor(v).numpy().tobytes() for v in kept] == values
            except wh.CheckpointError as error:
                found += 1
                assert file.name in str(error) or "data-" in str(error)
        file.write_bytes(whole)
    assert found >= 8
    manager.restore(path)


@pytest.mark.parametrize("state", [None, b"", b"\xff\xfe\0", b"model_checkpoint_path: 7", b'all { a: "' + b"{" * 20000])
def test_without_a_state_file_the_newest_complete_one_is_found(
    state: bytes | None, ranks: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2)
    v, checkpoint = two(tmp_path)
    (tmp_path / "checkpoint").unlink()
    if state is not None:
        (tmp_path / "checkpoint").write_bytes(state)
    (tmp_path / "ckpt-9.index").touch()  # of one that was not completed
    manager = wh.CheckpointManager(checkpoint, tmp_path, 3)
    assert "2 complete checkpoints were found by their data files" in capsys.readouterr().err
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-1", "ckpt-2"]
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert v.numpy().tolist() == [2.0] * 4 and int(checkpoint.save_counter) == 2
    assert manager.save() == str(tmp_path / "ckpt-3")


@pytest.mark.parametrize("name", ["../other/ckpt-1", "/etc/passwd", "below/ckpt-1", "..", "a/../../other/ckpt-1", ""])
def test_a_state_file_never_leaves_its_folder(name: str, ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    folder, other = tmp_path / "folder", tmp_path / "other"
    _, checkpoint = two(folder)
    other.mkdir()
    for kind in ("index", "data-00000-of-00001"):
        (other / f"ckpt-1.{kind}").touch()
    text = (
        f'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "{name}"\nall_model_checkpoint_paths: "ckpt-2"'
    )
    (folder / "checkpoint").write_text(text)
    with pytest.raises(wh.CheckpointError, match="not in its folder"):
        wh.CheckpointManager(checkpoint, folder, 1)
    assert len(list(other.iterdir())) == 2


def test_a_folder_may_have_been_moved(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    _, checkpoint = two(tmp_path / "a")
    (tmp_path / "a" / "checkpoint").write_text('model_checkpoint_path: "/gone/ckpt-2"')
    (tmp_path / "a").rename(tmp_path / "b")
    manager = wh.CheckpointManager(checkpoint, tmp_path / "b", 3)
    assert manager.restore_or_initialize() == str(tmp_path / "b" / "ckpt-2")


def test_ranks_with_other_folders_or_numbers_are_told_apart() -> None:
    same = saving.RankMessage(place="/a", number=3, digest=b"x")
    saving.check_equal([same, same])
    for other, match in (
        (saving.RankMessage(place="/b", number=3, digest=b"x"), r"rank 0 uses /a, rank 1 uses /b"),
        (saving.RankMessage(place="/a", number=4, digest=b"x"), r"rank 0 saves number 3, rank 1 saves number 4"),
        (
            saving.RankMessage(place="/a", number=3, digest=b"y"),
            r"rank 0 and rank 1 have checkpoints of different variables",
        ),
    ):
        with pytest.raises(wh.CommError, match=match):
            saving.check_equal([same, other])


def test_hosts_that_have_another_folder_are_named() -> None:
    first, other = saving.RankMessage(host="h0"), saving.RankMessage(host="h1", sees_folder=False)
    saving.refuse_folders_apart([first, first], "/a")
    with pytest.raises(wh.CheckpointError, match="is not the same folder on h1") as raised:
        saving.refuse_folders_apart([first, other, other], "/a")
    assert (
        raised.value.facts["ranks"] == "1, 2"
        and "/a: a file that rank 0 has written there on h0" in raised.value.facts["given"]
    )
