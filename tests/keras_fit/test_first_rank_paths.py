"""Paths that each rank makes up for itself: all ranks read what the first one wrote."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launcher.helpers import Launcher
from whale.errors import CheckpointError
from whale.frontends.keras.first_rank_paths import find_first_path, have_differed, link_written, pair_paths

SCRIPT = """
import os, tempfile, uuid
import numpy as np, keras, whale as wh
wh.init()
keras.utils.set_random_seed(2)
x, y = np.random.default_rng(0).normal(size=(22, 4)), np.arange(22.0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.05), "mse")

def fit(*callbacks, epochs=2):
    return model.fit(x, y, batch_size=11, epochs=epochs, verbose=0, callbacks=list(callbacks)).history["loss"]

def zeroed(load):
    wanted = model.get_weights()
    model.set_weights([0 * w for w in wanted])
    found = load() or model
    for one, other in zip(found.get_weights(), wanted):
        np.testing.assert_array_equal(one, other)

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise InterruptedError

model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=[keras.callbacks.CSVLogger(os.getcwd() + "/log.csv")])
own = tempfile.mkdtemp(prefix=f"rank{wh.rank()}-", dir=os.getcwd())
epochs = keras.callbacks.ModelCheckpoint(own + "/every/{epoch:02d}.keras")
fit(epochs, keras.callbacks.CSVLogger(own + "/log.csv"))
assert sorted(os.listdir(own + "/every")) == ["01.keras", "02.keras"]
assert len(open(own + "/log.csv").read().splitlines()) == 3
zeroed(lambda: keras.models.load_model(own + "/every/02.keras"))

named = tempfile.NamedTemporaryFile(suffix=".weights.h5", dir=os.getcwd())
whole = f"{own}/{uuid.uuid4().hex}.keras"
model.save(whole)
model.save_weights(named.name)
zeroed(lambda: model.load_weights(named.name))
assert os.path.getsize(named.name)
zeroed(lambda: keras.models.load_model(whole))

try:
    fit(keras.callbacks.BackupAndRestore(own + "/backup"), Stop())
except InterruptedError:
    pass
assert len(fit(keras.callbacks.BackupAndRestore(own + "/backup"), epochs=3)) == 2
wh.check_replicas()
print("equal")
"""


def test_what_the_first_rank_wrote_is_found_by_the_other_rank(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2, done.stdout
    assert done.stderr.count("all ranks will read what rank 0 writes") == 1, done.stderr
    assert os.devnull not in done.stderr, done.stderr  # where CSVLogger writes on other ranks


def context(rank: int) -> Any:
    return SimpleNamespace(rank=rank, first_paths={})


def test_files_of_one_name_stand_for_their_folders() -> None:
    first = [("ModelCheckpoint", "/t/a/best.h5"), ("CSVLogger", "/t/1.csv")]
    own = [("ModelCheckpoint", "/t/b/best.h5"), ("CSVLogger", "/t/2.csv")]
    assert pair_paths([first, own], context(1)) == {
        "/t/b/best.h5": "/t/a/best.h5", "/t/b": "/t/a", "/t/2.csv": "/t/1.csv",
    }  # fmt: skip
    assert pair_paths([first, own], context(0)) == {} and have_differed([first, own])


def test_callbacks_of_one_rank_are_nobody_elses() -> None:
    everyone = [[("TensorBoard", "/t/a")], [], [("TensorBoard", "/t/a")]]
    assert not have_differed(everyone)
    assert not any(pair_paths(everyone, context(rank)) for rank in range(3))


def test_links_leave_what_a_rank_wrote_itself(tmp_path: Path) -> None:
    first, own = tmp_path / "a", tmp_path / "b"
    for folder in (first, own):
        folder.mkdir()
        (folder / "both").write_text(folder.name)
    (first / "best-1").write_text("1")
    (own / "7.csv").touch()
    (tmp_path / "5.csv").write_text("rows")
    link_written([(f"{own}/best-{{epoch}}", f"{first}/best-{{epoch}}"), (str(own / "7.csv"), str(tmp_path / "5.csv"))])
    assert sorted(os.listdir(own)) == ["7.csv", "best-1", "both"]
    assert (own / "best-1").read_text() == "1" and (own / "7.csv").read_text() == "rows"
    link_written([(str(own), str(first)), (str(tmp_path / "new"), str(first))])
    assert (own / "both").read_text() == "b" and (tmp_path / "new" / "both").read_text() == "a"


def test_a_path_that_is_nowhere_names_both(tmp_path: Path) -> None:
    run = context(1)
    run.first_paths[str(tmp_path / "b")] = str(tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"(?s)rank 0 writes to .*a/m.*rank 1 reads .*b/m.*next: pass the same path"
    ):
        find_first_path(str(tmp_path / "b" / "m"), run)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "m").touch()
    assert find_first_path(str(tmp_path / "b" / "m"), run) == str(tmp_path / "a" / "m")
    assert find_first_path(str(tmp_path / "c"), run) == str(tmp_path / "c")
