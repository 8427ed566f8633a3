"""What every rank reads whole is the same on all of them, and where it is not, the step says so."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

HEAD = """
import numpy as np, tensorflow as tf, whale as wh
w = tf.Variable(np.ones((1, 1)), name="w")
"""


def prints(launcher: Launcher, text: str) -> list[str]:
    """What each of two ranks prints in a script that ends well."""
    done = launcher.run("-np", "2", launcher.script(HEAD + text), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("] ")[2] for line in done.stdout.splitlines()]


def test_shuffles_without_a_seed_give_one_batch_to_all_ranks(launcher: Launcher) -> None:
    said = prints(
        launcher,
        """
from whale.frontends.keras.input_pipeline import common_seed
wh.init()
total = wh.function(lambda x: tf.reduce_sum(tf.matmul(tf.reshape(x, [-1, 1]), w)))
if wh.rank() == 0:
    list(tf.data.Dataset.range(9).shuffle(9))
batches = tf.data.Dataset.range(64).map(lambda n: tf.cast(n, tf.float64)).shuffle(64).batch(8)
epochs = [[x.numpy() for x in batches] for _ in range(2)]
assert not np.array_equal(*epochs)
again = np.stack([x.numpy() for x in tf.data.Dataset.range(64).shuffle(64).batch(8)])
assert not np.array_equal(epochs[0], again)
with common_seed():
    drawn = float(tf.random.uniform([]))
assert tf.random.uniform([]) != drawn
refused = wh.rank() > 0  # the others write nothing
try:
    tf.train.Checkpoint(at=iter(wh.shard(batches))).write("here")
except wh.ProgramError as error:
    refused = "a shuffle without a seed" in str(error)
print([sum(float(total(x)) for x in epoch) for epoch in epochs], epochs[1][0], again[0], drawn, refused)
""",
    )
    assert len(said) == 2, said
    assert said[0] == said[1]
    assert said[0].startswith("[2016.0, 2016.0]")
    assert said[0].endswith("True")


def test_keras_shuffles_arrays_alike_on_all_ranks(launcher: Launcher) -> None:
    """Without a seed: in each epoch another order of the rows, of which the ranks compute all."""
    said = prints(
        launcher,
        """
import keras, tf_keras
wh.init()

def orders(keras):
    seen = []

    class Model(keras.Model):
        def train_step(self, batch):
            x, _ = batch
            tf.py_function(lambda rows: seen.append(rows.numpy()[:, 0].tolist()), [tf.identity(x)], [])
            return {"sum": tf.reduce_sum(x)}

    model = Model()
    model.compile()
    rows = np.arange(32.0)[:, None]
    sums = model.fit(rows, rows, batch_size=8, epochs=3, verbose=0).history["sum"]
    epochs = np.reshape(seen, [3, 32])  # a Python function runs on every rank, with the whole batch
    np.testing.assert_array_equal(np.sort(epochs), [np.arange(32)] * 3)
    assert not any(np.array_equal(one, other) for one, other in zip(epochs, epochs[1:]))
    return sums

def refused(keras):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = np.ones((4, 1))
    model.fit(rows, rows, epochs=2, verbose=0)
    try:
        model.fit(rows, rows + wh.rank(), verbose=0)
    except wh.ProgramError as error:
        return str(error.facts["argument"]), error.facts["given"]

print(orders(keras), orders(tf_keras), refused(keras), refused(tf_keras))
""",
    )
    assert len(said) == 2, said
    assert said[0] == said[1]
    assert said[0].count("('y', 'ranks 0 and 1 pass different values in these arrays')") == 2, said


def test_what_differs_between_ranks_is_found(launcher: Launcher) -> None:
    """All in one run: an error that every rank raises leaves the run as it was; the last one ends it."""
    launcher.environment["WHALE_DEBUG_CHECK_TIMEOUT_S"] = "3600"
    text = """
wh.init({"debug.check_inputs": 5})
rank, x = wh.rank(), np.ones((8, 1))

def refused(what, call, *arguments):
    try:
        call(*arguments)
    except wh.WhaleError as error:
        print(what, type(error).__name__, " ".join(str(error).split()))

step = wh.function(lambda x: (w.assign_add(tf.reshape(tf.reduce_mean(x), [1, 1])), tf.reduce_sum(tf.matmul(x, w)))[1])
step(x)
refused("argument:", step, x + rank)
for _ in range(4):
    step(x)
refused("later:", step, x + rank)
for name, size in (("constant", 5), ("captured", 9_000_000)):  # the latter is no part of the program
    table = tf.constant(np.arange(float(size)) + rank)
    refused(name + ":", wh.function(lambda x: tf.reduce_sum(tf.matmul(x, w)) + tf.gather(table, [3])), x)
scaled = wh.function(lambda x, factor: tf.reduce_sum(tf.matmul(x, w)) * factor)
refused("scalar:", scaled, x, 1.0 + rank)
refused("shapes:", wh.function(lambda x: tf.reduce_sum(tf.matmul(x, w))), np.ones((8 + rank, 1)))
refused("text:", wh.function(lambda x, t: tf.reduce_sum(tf.matmul(x, w))), x, tf.constant(["ab"[rank]]))
w.assign([[2.0]])
step(x)
never_used = tf.Variable(tf.ones([2]) * rank, name="never_used")
trained = tf.Variable(tf.ones([2]), name="trained")
trained.assign_sub(tf.ones([2]))
print("compared:", wh.check_replicas())
trained.assign_sub(tf.ones([2]) * rank)
refused("replicas:", wh.check_replicas)
w.assign([[2.0 + rank]])
refused("manager:", wh.CheckpointManager(tf.train.Checkpoint(w=w), "saved", 1).save)
refused("values:", step, x)
w.assign([[2.0]])
step(x)
w[0].assign([2.0 + rank])
refused("sliced:", step, x)
w.assign([[2.0]])
step(x)
wh.init({"debug.check_inputs": 5, "debug.check_replicas": 3})
again = wh.function(lambda x: tf.reduce_sum(tf.matmul(x, w)))
again(x)
if rank == 1:  # in a way that nothing notes
    tf.raw_ops.AssignVariableOp(resource=w.handle, value=tf.constant([[4.0]], tf.float64))
again(x)
again(x)
refused("periodic:", again, x)
w.assign([[2.0]])
step(x)
if rank == 1:
    w.assign([[5.0]])
step(x)
"""
    done = launcher.run("-np", "2", launcher.script(HEAD + text), timeout_s=600)
    assert done.returncode == 1, done.stdout + done.stderr
    for rank in (0, 1):
        said = {
            line.partition("] ")[2].partition(": ")[0]: line.partition(": ")[2]
            for line in done.stdout.splitlines()
            if line.startswith(f"[{rank}]")
        }
        for what, call in (("argument", 1), ("later", 5)):
            assert said[what].startswith("ProgramError the ranks pass different values"), said
            assert f"argument: x given: ranks 0 and 1 pass different values in call {call}" in said[what], said
            assert "wh.shard" in said[what]
        for what in ("captured", "text"):
            assert said[what].startswith("ProgramError the ranks pass different values"), said
        for what in ("constant", "scalar"):
            assert said[what].startswith("ProgramError the ranks are about to run different programs"), said
        both = "rank 0 has x (Placeholder) of float64[8,1]; rank 1 has x (Placeholder) of float64[9,1]"
        assert both in said["shapes"], said
        assert said["compared"] == "2", said
        assert said["replicas"].startswith("CommError a variable differs between ranks variable: trained on rank 1")
        assert "seen at call 3 of the step" in said["periodic"], said
        for what in ("manager", "values", "sliced", "periodic"):
            assert said[what].startswith("CommError a variable differs between ranks variable: w on rank 1"), said
    assert "after this rank assigned to w outside of steps" in done.stderr, done.stderr


def test_weights_that_one_rank_sets_last_are_named_at_the_end(launcher: Launcher) -> None:
    text = """
wh.init()
rows = tf.Variable(0.0, trainable=False, name="rows")
add = lambda x: (w.assign_add(tf.reshape(tf.reduce_mean(x), [1, 1])), rows.assign_add(8.0))
wh.function(add)(np.ones((8, 1)))
if wh.rank() == 0:
    rows.assign(0.0)  # as of a metric that is shown
else:
    w.assign([[5.0]])
"""
    done = launcher.run("-np", "2", launcher.script(HEAD + text), timeout_s=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "at the end of the run trainable variables differ between the ranks: w on rank 1;" in done.stderr, (
        done.stderr
    )
