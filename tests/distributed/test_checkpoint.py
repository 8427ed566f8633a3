"""``wh.CheckpointManager`` between processes."""

from __future__ import annotations

import pytest

from tests.launcher.helpers import Launcher

TEXT = """
import os, sys
import tensorflow as tf, whale as wh

wh.init()
v = tf.Variable(float(wh.rank()), name="v")
checkpoint = tf.train.Checkpoint(v=v)

def manager(**options):
    return wh.CheckpointManager(checkpoint, "saved", 2, **options)
"""


@pytest.mark.slow
def test_all_ranks_write_and_read_one_checkpoint(launcher: Launcher) -> None:
    script = launcher.script(
        TEXT
        + """
first = manager()
assert first.restore_or_initialize() is None and first.checkpoints == []
for number in range(20):
    path = first.save()
    assert path == first.latest_checkpoint == os.path.join("saved", f"ckpt-{number + 1}"), path
    assert os.path.exists(path + ".index")  # with 2 to keep, the first rank has not gone on beyond the next
    assert int(checkpoint.save_counter) == number + 1
assert [os.path.basename(p) for p in first.checkpoints] == ["ckpt-19", "ckpt-20"]
v.assign(9.0)
second = manager()
assert second.checkpoints == first.checkpoints
assert second.restore_or_initialize() == second.latest_checkpoint
assert float(v) == 0.0, v  # the first rank's, on every rank
assert int(checkpoint.save_counter) == 20

open("file", "w").close()
try:
    wh.CheckpointManager(checkpoint, "file/below", 1)
except wh.CheckpointError as error:
    assert "could not be opened" in str(error) and "ranks: 0" in str(error), error
else:
    raise AssertionError("a file was taken for a folder")
second.save()
print("done")
"""
    )
    done = launcher.run("-np", "2", script, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]


def test_one_process_needs_no_others(tmp_path) -> None:
    import tensorflow as tf

    import whale as wh

    with pytest.raises(wh.ClusterError, match=r"wh\.init"):
        wh.CheckpointManager(tf.train.Checkpoint(), tmp_path, 1)
    wh.init()
    try:
        v = tf.Variable(1.0)
        manager = wh.CheckpointManager(tf.train.Checkpoint(v=v), tmp_path, 1)
        path = manager.save(checkpoint_number=7)
        assert path is not None and path.endswith("-7") and manager.checkpoints == [path]
        v.assign(2.0)
        assert manager.restore_or_initialize() == path and float(v) == 1.0
        assert manager.checkpoint is not None and manager.directory == str(tmp_path)
    finally:
        wh.shutdown()
