"""Every exchange of Horovod's API on two ranks, against what it means; run by test_exchanges.py."""

import numpy as np
import tensorflow as tf

import whale.horovod as hvd
from whale.errors import ClusterError, ProgramError


def equal(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def refused(call, kind, *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise SystemExit(f"not refused: {words}")


refused(hvd.rank, ClusterError, "hvd.rank() needs hvd.init()")
hvd.init()
hvd.init()
r = hvd.rank()
assert (hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (2, r, 2, 0, 1)
assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.global_process_set.ranks == [0, 1]
# Random states stay the ranks' own.
assert len(set(hvd.allgather_object(np.random.default_rng().integers(1 << 60)))) == 2
np.random.seed(r)
assert len(set(hvd.allgather_object(np.random.randint(1 << 30)))) == 2

x = tf.constant([1.0 + r, 2.0])
equal(hvd.allreduce(x), [1.5, 2])
equal(hvd.allreduce(x, average=False), [3, 4])
equal(hvd.allreduce(x, op=hvd.Sum, name="named"), [3, 4])
equal(hvd.allreduce(x, op=hvd.Min), [1, 2])
equal(hvd.allreduce(x, op=hvd.Max), [2, 2])
equal(hvd.allreduce(x, op=hvd.Product), [2, 4])
equal(hvd.allreduce(x, compression=hvd.Compression.fp16), [1.5, 2])
equal(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0, op=hvd.Sum), [18, 24])
equal(hvd.allreduce(2.0 * r), 1.0)
equal(hvd.allreduce(np.int64(4 + 3 * r)), 5)  # 5.5, cut off
for found, expected in zip(hvd.grouped_allreduce([x, np.array([r, 1.0]), x * 2]), ([1.5, 2], [0.5, 1], [3, 4])):
    equal(found, expected)
slices = tf.IndexedSlices(tf.constant([[1.0 + r]]), tf.constant([r]), tf.constant([2, 1]))
equal(tf.convert_to_tensor(hvd.allreduce(slices)), [[0.5], [1]])
equal(hvd.allgather(np.full((r + 1, 2), r)), [[0, 0], [1, 1], [1, 1]])
equal(hvd.broadcast(np.arange(3) + r, 1), [1, 2, 3])
equal(hvd.alltoall(tf.constant([[10 * r], [10 * r + 1]])), [[r], [10 + r]])
got, came = hvd.alltoall(tf.range(3) + 10 * r, splits=[1, 2] if r == 0 else [3, 0])
equal(got, [[0, 10, 11, 12], [1, 2]][r])
equal(came, [[1, 3], [2, 0]][r])
equal(hvd.reducescatter(tf.range(3.0) + r), [[0.5, 1.5], [2.5]][r])
equal(hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1], [[3], [4]][r])
assert hvd.broadcast_object({"rank": r}, 1) == {"rank": 1} and hvd.allgather_object(r) == [0, 1]
v, w = tf.Variable([1.0 * r]), tf.Variable(r + 5)
hvd.broadcast_variables([v, w], 1)
equal(v, [1])
equal(w, 6)


def gradient_of(exchange, expected) -> None:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(exchange(x) * (r + 1.0))
    equal(tape.gradient(loss, x), expected)


gradient_of(lambda x: hvd.allreduce(x * x, op=hvd.Sum), 2 * x * 3)
gradient_of(hvd.allgather, [1.5, 1.5])
gradient_of(lambda x: hvd.broadcast(x, 0), [1.5, 1.5] if r == 0 else [0, 0])
gradient_of(lambda x: hvd.alltoall(x, splits=[2 - r, r])[0], [[1, 1], [1, 2]][r])
gradient_of(hvd.reducescatter, [1, 2])


@tf.function
def step(x):
    dealt, _ = hvd.alltoall(x, splits=tf.stack([1, tf.shape(x)[0] - 1]))
    return hvd.allreduce(tf.reduce_sum(x)), hvd.allgather(x), hvd.broadcast(x[:1], 0), dealt


if r == 1:  # What one rank traces alone, or anew, gives the exchanges no other names.
    tf.function(lambda x: tf.cond(x > 0, lambda: x, lambda: -x))(tf.constant(1.0))
for k in range(4):
    rows = 3 if k == 2 and r == 1 else 2
    mean, gathered, first, dealt = step(tf.range(float(rows)) + r + k)
    sums = [sum(range(n)) + n * (rank + k) for rank, n in ((0, 2), (1, 3 if k == 2 else 2))]
    equal(mean, sum(sums) / 2)
    equal(gathered, [k, k + 1, *range(k + 1, k + 4 if k == 2 else k + 3)])
    equal(first, [k])
    equal(dealt, [[k, k + 1], [k + 1, *range(k + 2, k + 4 if k == 2 else k + 3)]][r])

refused(lambda: hvd.allreduce(x, op=hvd.Adasum), ProgramError, "does not implement the reduction Adasum", "hvd.Average")
refused(lambda: hvd.allreduce(x, op=3), ProgramError, "op is not a reduction", "op=3")
refused(lambda: hvd.allreduce(x, process_set=3), ProgramError, "among all ranks")
refused(lambda: hvd.allreduce(slices, op=hvd.Max), ProgramError, "tf.IndexedSlices", "sparse_as_dense")
refused(lambda: hvd.broadcast(x, 7), ProgramError, "root_rank=7", "from 0 to 1")
refused(lambda: hvd.allgather(1.0), ProgramError, "tf.reshape")
refused(lambda: hvd.alltoall(tf.range(3)), ProgramError, "3 rows for 2 ranks")
refused(lambda: hvd.elastic.run, ProgramError, "hvd.elastic.run", "--max-restarts")
refused(hvd.join, ProgramError, "the same number of steps on every rank")
refused(lambda: hvd.start_timeline("t"), ProgramError, "whale run --trace")
refused(lambda: hvd.add_process_set([0]), ProgramError, "no process sets")
refused(lambda: hvd.broadcast_global_variables(0), ProgramError, "hvd.broadcast_variables")

hvd.shutdown()
assert not hvd.is_initialized()
print("all exchanges", r)
