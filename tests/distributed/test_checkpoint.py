"""``wh.CheckpointManager`` between processes."""

from __future__ import annotations

import pytest

from tests.launcher.helpers import Launcher

TEXT = """
import os, sys
import numpy as np, tensorflow as tf, whale as wh

wh.init()
v = tf.Variable(float(wh.rank()), name="v")
checkpoint = tf.train.Checkpoint(v=v)

def manager(**options):
    return wh.CheckpointManager(checkpoint, "saved", 2, **options)
"""


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
second.save()
damaged = sorted(n for n in os.listdir("saved") if n.startswith("ckpt-22.data"))[-1]
if wh.rank() == 0:
    with open(f"saved/{damaged}", "r+b") as file:
        first_byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first_byte ^ 1]))
try:
    second.save(checkpoint_number=30 + wh.rank())
except wh.CommError as error:
    assert "rank 0 saves number 30, rank 1 saves number 31" in str(error), error
else:
    raise AssertionError("ranks saved other numbers")
third = manager()
try:
    third.restore_or_initialize()
except wh.CheckpointError as error:
    assert "ckpt-22" in str(error), error
else:
    raise AssertionError("a damaged checkpoint was restored")
assert third.restore_or_initialize(fallback=True) == os.path.join("saved", "ckpt-21") and float(v) == 0.0
try:
    wh.CheckpointManager(checkpoint, f"saved{wh.rank()}", 2).save()
except wh.CommError as error:
    assert "rank 0 uses" in str(error) and "saved1" in str(error), error
else:
    raise AssertionError("ranks used other folders")

with tf.Graph().as_default() as graph:  # a session's variables, with a Saver on every rank
    w = tf.compat.v1.get_variable("w", [3], tf.float64, use_resource=True)
    add, start = w.assign_add(tf.ones([3], tf.float64)).op, tf.compat.v1.global_variables_initializer()
    saver = tf.compat.v1.train.Saver(max_to_keep=2)
with wh.Session(graph=graph) as session:
    session.run(start)
    for number in range(6):
        session.run(add)
        path = saver.save(session, os.path.abspath("saved_v1/model"), number)
        assert os.path.exists(path + ".index") and tf.train.load_variable(path, "w").shape == (3,)
    wanted = session.run(w)
    session.run(add)
    saver.restore(session, path)
    assert np.array_equal(session.run(w), wanted) and np.array_equal(tf.train.load_variable(path, "w"), wanted)
    try:
        saver.save(session, "/dev/null/model")
    except (ValueError, tf.errors.OpError):
        pass
    else:
        raise AssertionError("saved to nowhere")
    session.run(add)  # training goes on
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
