"""Small exchanges are carried on by the threads that ask for them, beside large ones, in processes of their own."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import random, time
import numpy as np
import tensorflow as tf
import whale as wh
import whale_ops
from whale.runtime.context import require_current

wh.init()
ops, comm, rank, size = whale_ops.load_ops(), require_current().comms[0], wh.rank(), wh.size()
draw = random.Random(rank)

def chain(x, wide):
    handle, sums = ops.whale_communicator(communicator=comm.name), []
    sums += ops.whale_all_reduce(handle, [wide], key="large")
    for i in range(20):
        (x,) = ops.whale_all_reduce(handle, [x], key=f"sum {i}")
        parts = ops.whale_all_to_all(handle, tf.reshape(x, [size, -1]), key=f"parts {i}", split_axis=0,
                                     split_sizes=[1] * size, concat_axis=1, concat_sizes=[4] * size)
        x = tf.reshape(parts, [-1]) / size
    return x, sums[0]

step = tf.function(chain, autograph=False)
parts = [np.arange(4.0 * size) + 100 * r for r in range(size)]
for number in range(40):
    if number % 3 == 0:
        time.sleep(draw.random() * 2e-3)  # others wait for it, or it for them
    small, large = step(tf.constant(parts[rank]), tf.fill([200_000], float(rank + number)))
    every = [part.copy() for part in parts]
    for _ in range(20):
        total = sum(every).reshape(size, 4)
        every = [np.tile(total[r], size) / size for r in range(size)]
    np.testing.assert_allclose(small, every[rank], rtol=1e-12)
    np.testing.assert_array_equal(large, np.full(200_000, sum(r + number for r in range(size)), np.float32))
    if number % 10 == 0:
        assert comm.allgather_bytes(f"said {number}", b"%d" % rank) == [b"%d" % r for r in range(size)]
print("equal", flush=True)
wh.shutdown()
"""


def test_chains_beside_large_exchanges(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", launcher.script(SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 3, done.stdout
