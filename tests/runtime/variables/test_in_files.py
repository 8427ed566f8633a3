"""Tables in files: steps, optimizers and checkpoints as of tables in memory, and what they write is in the files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import Bags
from benchmarks.giant.measure import SPREAD, Line, difference, ranks
from tests.frontends.layers.test_embedding import LAZY, LIMIT, lazy
from whale.errors import PlanError
from whale.runtime.variables import checkpoint_regions


def mapped_bytes(folder: Path) -> list[int]:
    """Sizes of the files of a folder that this process maps."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            first, last = (int(n, 16) for n in line.split()[0].split("-"))
            found.append(last - first)
    return sorted(found)


@pytest.mark.parametrize(
    "form", [{}, {"dynamic": True, "sharded": "columns"}, pytest.param({"optimizer": lazy}, marks=LAZY)]
)
def test_over_ranks_as_on_one_device(form: dict[str, Any], tmp_path: Path) -> None:
    make = partial(Bags, tables=1, folder=str(tmp_path), **form)
    assert difference(Line("files", make, 0, 2)) <= LIMIT


@LAZY
def test_updates_stay_in_the_files_and_the_state_is_there_too(tmp_path: Path) -> None:
    words, width = 4096, 8
    with ranks(Line("files", Bags, 0, 2)):
        layer = wh.layers.Embedding(words, width, "sum", folder=str(tmp_path), dtype="float32")
        layer.build()
        optimizer = wh.optimizers.lazy(tf.keras.optimizers.Adam(0.001))
        optimizer.build(layer.trainable_variables)

        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) ** 2)
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return loss

        run = wh.function(step)
        losses = [float(run(tf.constant([[1, 4000], [7, 1]]))) for _ in range(4)]
        assert losses[-1] < losses[0]
        # Table and two moments, of two ranks: nobody has made a copy of them in memory.
        assert mapped_bytes(tmp_path) == [words * width * 4 // 2] * 6
        assert not list(tmp_path.iterdir())  # the files go with the process
        before = layer.embeddings.numpy()
        run(tf.constant([[2, 2], [2, 2]]))
        np.testing.assert_array_equal(np.nonzero((layer.embeddings.numpy() != before).any(1))[0], [2])


def test_saved_and_restored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_regions, "_PIECE_BYTES", 256)  # eight rows
    folders = [tmp_path / "first", tmp_path / "second"]
    made: list[Callable[..., Bags]] = []
    for folder in folders:
        folder.mkdir()
        made.append(partial(Bags, tables=1, folder=str(folder)))

    def manager(model: Bags) -> wh.CheckpointManager:
        return wh.CheckpointManager(tf.train.Checkpoint(table=model.variables[0]), str(tmp_path / "saved"), 1)

    with ranks(Line("files", made[0], 0, 2)):
        model = made[0](SPREAD, tf.float32)
        wh.function(model.step)(*model.batch(0))
        manager(model).save()
        expected = model.variables[0].numpy()
    with ranks(Line("files", made[1], 0, 3)):
        model = made[1](SPREAD, tf.float32)
        step = wh.function(model.step)
        step(*model.batch(1))
        held = mapped_bytes(folders[1])
        manager(model).restore_or_initialize()
        np.testing.assert_array_equal(model.variables[0].numpy(), expected)
        step(*model.batch(1))
        assert mapped_bytes(folders[1]) == held and len(held) == 3


def test_a_folder_without_room_is_refused(tmp_path: Path) -> None:
    make = partial(Bags, tables=1, folder=str(tmp_path / "none"))
    with ranks(Line("files", make, 0, 2)):
        model = make(SPREAD, tf.float32)
        with pytest.raises(PlanError, match="cannot be stored in a file"):
            wh.function(model.step)(*model.batch(0))
