"""Steps that read batches of iterators themselves, between processes."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import sys
import numpy as np, tensorflow as tf, whale as wh

X = np.arange(64, dtype=np.float32)[:, None]
local = sys.argv[1] == "local"
wh.init({"batch.mode": sys.argv[1], "mesh.plan_cache": ""})  # a step from the cache has no plan

def seen(iterator):
    total, ones = tf.Variable(0.0), tf.ones([1, 1])
    step = wh.function(lambda it: total.assign_add(tf.reduce_sum(tf.matmul(next(it), ones))))
    try:
        while True:
            step(iterator)
    except tf.errors.OutOfRangeError:
        pass
    plans = [s.compiled.plan for s in step._steps.values()]
    return float(total), [b.placement.sizes for p in plans for b in p.batch_inputs]

arrays = tf.data.Dataset.from_tensor_slices(X[wh.rank() * 32 : wh.rank() * 32 + 32] if local else X)
found = [seen(iter(arrays.batch(8)))]
if not local:
    found += [seen(iter(arrays.shuffle(64).batch(8))), seen(iter(wh.shard(arrays.batch(8))))]
    data, order = arrays.shuffle(64).batch(8), tf.Variable(0.0)

    @wh.function
    def loop(rows):
        for x in rows:
            order.assign(0.9 * order + x[0, 0])

    loop(data)
    for x in data:  # goes on behind the loop's order, on every rank
        loop(tf.data.Dataset.from_tensors(x))
        wh.function(lambda x: order.assign_add(x[0, 0]))(x)
    def turns(function):
        # What steps read in loops, branches and whole, and what the script reads after each of them.
        data = tf.data.Dataset.from_tensor_slices(X).shuffle(64, seed=5).batch(8)
        # An iterator that reads ahead would draw the next order at a moment of its own, on one device too.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        data = data.with_options(options)
        iterator, add = iter(data.repeat()), lambda total, x: 0.9 * total + x[0, 0]

        @function
        def in_loop(it):
            total = tf.zeros([])
            for _ in tf.range(3):
                total = add(total, next(it))
            return total

        @function
        def in_branch(it, wanted):
            total = tf.zeros([])
            if wanted:
                total = add(total, next(it))
            return total

        optional = function(lambda it: add(0.0, it.get_next_as_optional().get_value()))
        reduced = function(lambda most: data.take(most).reduce(tf.zeros([]), add))
        single = function(lambda: add(0.0, data.take(1).get_single_element()))
        behind, seen = function(lambda x: add(0.0, x)), []
        for call in (lambda: in_loop(iterator), lambda: in_branch(iterator, tf.constant(True)),
                     lambda: in_branch(iterator, tf.constant(False)), lambda: optional(iterator),
                     lambda: reduced(tf.constant(3, tf.int64)), single):
            seen += [call(), behind(next(iterator)), *(behind(x) for x in data.take(2))]
        return [float(one) for one in seen]

    assert turns(wh.function) == turns(lambda f: f), (turns(wh.function), turns(lambda f: f))
wh.check_replicas()
print("rank", wh.rank(), found)
"""


def test_every_row_once(launcher: Launcher) -> None:
    """Shuffles without a seed draw other orders on each rank, and the first one's counts."""
    done = launcher.run("-np", "2", launcher.script(SCRIPT), "global", timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} {[(2016.0, [(4, 4)])] * 3}" in done.stdout, done.stdout


def test_batches_that_each_rank_reads_for_itself(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), "local", timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 1 {[(2016.0, [(8, 8)])]}" in done.stdout, done.stdout
