"""What scripts do with a strategy beside the tutorials, on two ranks; run by test_strategy.py."""

import numpy as np
import tensorflow as tf

import whale as wh
from whale.errors import ClusterError, ProgramError


@tf.function
def before(x):  # decorated before there is a strategy
    return strategy.run(lambda x: tf.reduce_sum(x * w), args=(x,))


strategy = wh.Strategy(config={"batch.mode": "global"})
r = wh.rank()
w = tf.Variable(2.0)
rows = np.arange(8, dtype=np.float32)
assert strategy.num_replicas_in_sync == 1 and not tf.distribute.has_strategy()
with strategy.scope() as scope:
    assert scope is strategy and not tf.distribute.has_strategy()


def is_divided(step, *args) -> None:
    plan = step.plan(*args)
    assert any(r.source != r.target for r in plan.reshards), plan


def refused(call, kind, *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return
    raise SystemExit(f"not refused: {words}")


assert float(before(rows)) == 56.0
is_divided(before._whale_step, rows)


# a function inside of a function, and a method
@tf.function
def inner(x):
    y = strategy.run(lambda x: tf.reduce_mean(x), args=(x,))
    return strategy.reduce("MEAN", y, axis=None)


@tf.function
def outer(x, scale):
    return inner(x) * scale


class Trainer:
    def __init__(self) -> None:
        self.seen = tf.Variable(0.0)

    @tf.function
    def step(self, x, factor=1.0):
        def replica(x):
            self.seen.assign_add(tf.reduce_sum(x))
            return tf.reduce_sum(x) * factor

        return strategy.run(replica, (x,))


assert float(outer(rows, tf.constant(2.0))) == 7.0
trainer = Trainer()
assert float(trainer.step(rows)) == 28.0 and float(trainer.step(rows, factor=3.0)) == 84.0
assert float(trainer.seen) == 56.0

# values of the one replica
total = strategy.run(lambda x: (tf.reduce_sum(x), x * 2), args=(rows,))
assert strategy.experimental_local_results(total) == (total,)
np.testing.assert_array_equal(strategy.gather(total[1], axis=0), rows * 2)
assert float(strategy.reduce(tf.distribute.ReduceOp.SUM, total[1], axis=0)) == 56.0
assert float(strategy.reduce("MEAN", total[1], axis=0)) == 7.0
assert strategy.experimental_distribute_values_from_function(lambda context: context.num_replicas_in_sync) == 1
assert strategy.extended._in_multi_worker_mode() and strategy.cluster_resolver.task_id == r
assert strategy.run(lambda x: tf.distribute.get_replica_context().all_reduce("sum", x) + 0, (rows,)).shape == (8,)

# functions that take their batches themselves: from an iterator, in a loop of their own, to the end
dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(24).batch(8))
iterator = iter(dataset)
seen = tf.Variable(0, dtype=tf.int64)


@tf.function
def several(iterator, count):
    def replica(x):
        seen.assign_add(tf.reduce_sum(x))
        return tf.reduce_sum(x)

    total = tf.constant(0, tf.int64)
    for _ in tf.range(count):
        total += strategy.run(replica, args=(next(iterator),))
    return total


assert int(several(iterator, tf.constant(2))) == sum(range(16)) and int(seen) == sum(range(16))
assert int(several(iterator, tf.constant(1))) == sum(range(16, 24))
refused(lambda: several(iterator, tf.constant(1)), tf.errors.OutOfRangeError, "End of sequence")
assert len(strategy._steps._found) == 3  # the nested function is one step, however often it was defined
(batch,) = [int(strategy.run(tf.reduce_sum, (x,))) for x in dataset][:1]
assert batch == 28


@tf.function
def with_closure(iterator):
    x = next(iterator)

    def replica():
        return tf.reduce_sum(x)

    return strategy.run(replica)


refused(lambda: with_closure(iter(dataset)), ProgramError, "captures a tensor of the enclosing function", "in args")

# an ordinary function stays TensorFlow's
plain = tf.function(lambda x: x + 1)
assert float(plain(tf.constant(1.0))) == 2.0 and not hasattr(plain, "_whale_mode")
assert plain.experimental_get_tracing_count() == 1

# what is refused
graph = tf.function(lambda x: strategy.run(tf.reduce_sum, (x,)), autograph=False)
refused(lambda: graph.get_concrete_function(tf.TensorSpec([8])), ProgramError, "strategy.run()", "wh.function")
refused(lambda: strategy.reduce("MAX", 1.0), ProgramError, "reduce_op='MAX'")
refused(lambda: strategy.make_input_fn_iterator, ProgramError, "strategy.make_input_fn_iterator")
refused(lambda: strategy.extended.value_container, ProgramError, "strategy.extended.value_container")
refused(lambda: strategy.experimental_distribute_dataset([1]), ProgramError, "of type list")
refused(lambda: wh.Strategy(devices=["GPU:0", "GPU:1"]), ProgramError, "GPU:1", "whale run -np")

wh.shutdown()
refused(lambda: strategy.run(tf.reduce_sum, (rows,)), ClusterError, "strategy.run() needs Whale to be started")
print("all of the strategy", r)
