"""Ranks of one host cache, take snapshots and save under one name, which each removes first, as scripts do."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.helpers import Launcher

SCRIPT = """
import glob, os, shutil
import numpy as np, tensorflow as tf, whale as wh
wh.init()
for old in glob.glob("kept*"):
    shutil.rmtree(old) if os.path.isdir(old) else os.unlink(old)
rows = np.random.default_rng(0).normal(size=(26, 3))
v = tf.Variable(np.ones((3, 1)))

@wh.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ v - x[:, :1]) ** 2)
    v.assign_sub(0.1 * tape.gradient(loss, v))
    return loss

def losses(data):
    v.assign(np.ones((3, 1)))
    return [float(step(x)) for _ in range(2) for x in data]

data = tf.data.Dataset.from_tensor_slices(rows)
data.save("kept-saved")
named = lambda i: data.shard(2, i).cache(tf.strings.join(["kept-", tf.strings.as_string(i)]))
expected = losses(data.batch(8))
for other in (
    data.cache("kept-cache").batch(8),
    data.snapshot("kept-snapshot").batch(8),
    wh.shard(data.cache("kept-too").batch(8)),
    wh.shard(tf.data.Dataset.load("kept-saved").batch(8)),
):
    np.testing.assert_allclose(losses(other), expected, rtol=1e-12)
assert np.isfinite(losses(tf.data.Dataset.range(2).interleave(named, cycle_length=2).batch(8))).all()
print("equal")
"""


def test_ranks_of_one_host_keep_datasets_under_one_name(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2, done.stdout
    assert done.stderr.count("in files of its own, in place of kept-cache") == 1, done.stderr
    assert {p.name for p in tmp_path.glob("kept*") if not p.name.endswith(".data-00000-of-00001")} == {
        "kept-saved", "kept-cache.index", "kept-too.index",
    }  # fmt: skip
