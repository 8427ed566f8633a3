"""Python that a step calls: the objects that it changes are there on every rank, and results are the first rank's."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

ENVIRONMENT = """
import numpy as np, tensorflow as tf, whale as wh
wh.init()
draw, seen, own = np.random.default_rng(3), [], np.random.default_rng(wh.rank())
w = tf.Variable(np.eye(2))
times = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
waiting = tf.queue.FIFOQueue(9, tf.float64, [])
latest = tf.Variable("none" if wh.rank() == 0 else "another rank's")

def move(state):
    seen.append(state.tolist())
    return state * 0.5 + draw.normal(size=2), np.float64(draw.uniform())

@wh.function
def episode(state):
    rewards = tf.TensorArray(tf.float64, 3)
    for t in tf.range(3):  # an environment inside of a loop, whose state goes on from step to step
        state, reward = tf.numpy_function(move, [tf.linalg.matvec(w, state)], [tf.float64, tf.float64])
        state = tf.ensure_shape(state, [2])
        rewards = rewards.write(t, reward)
    w.assign_sub(0.1 * tf.tensordot(state, state, 0))
    words = tf.constant(["a", "b"])
    times.insert(words, times.lookup(words) + [1, 2])  # what each process counts for itself
    waiting.enqueue(tf.reduce_sum(state))
    latest.assign(tf.strings.join([latest, tf.strings.as_string(times.size())]))
    return tf.reduce_sum(rewards.stack()), tf.py_function(lambda: own.uniform(), [], tf.float64)

found = [[float(x) for x in episode(tf.constant(draw.normal(size=2)))] for _ in range(3)]
assert times.lookup(tf.constant(["a", "b", "c"])).numpy().tolist() == [3, 6, 0]
assert latest.numpy() == b"none222"
queued = [float(waiting.dequeue()) for _ in range(3)]
alone = np.random.default_rng(3), np.eye(2)
expected, sums = [], []
for _ in range(3):
    state, total = alone[0].normal(size=2), 0.0
    for _ in range(3):
        state = alone[1] @ state * 0.5 + alone[0].normal(size=2)
        total += alone[0].uniform()
    alone[1][...] -= 0.1 * np.outer(state, state)
    expected.append(total)
    sums.append(state.sum())
first = np.random.default_rng(0)
np.testing.assert_allclose(found, [[e, first.uniform()] for e in expected], atol=1e-12)
np.testing.assert_allclose(w.numpy(), alone[1], atol=1e-12)
np.testing.assert_allclose(queued, sums, atol=1e-12)
wh.check_replicas()
print("equal", len(seen))
"""


def test_an_environment_inside_of_a_step_goes_on_on_every_rank(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(ENVIRONMENT), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] equal 9", "[1] equal 9"]


STRINGS = """
import tensorflow as tf, whale as wh
wh.init()
words = tf.queue.FIFOQueue(9, [tf.string], shapes=[[]])
words.enqueue_many([["a", "bb", "c", "d"]])
names = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
names.insert(tf.constant(list("abcde")), tf.range(5, dtype=tf.int64))
latest, weight = tf.Variable("none"), tf.Variable(1.0)

@wh.function
def step():
    text = words.dequeue()
    latest.assign(text)
    if text == "bb":
        weight.assign_add(1.0)
    keys, values = names.export()
    names.remove(tf.gather(keys, tf.argsort(values))[:1])
    weight.assign_add(1.0)
    return text, names.size()

@wh.function
def joined():
    text = tf.constant("")
    for _ in tf.range(2):
        text = tf.strings.join([text, words.dequeue()])
        weight.assign_add(1.0)
    return text

@wh.function
def mapped():
    data = tf.data.Dataset.range(3).map(lambda i: (names.insert([tf.strings.as_string(i)], [i]), i)[1])
    return data.reduce(tf.constant(0, tf.int64), lambda a, b: a + b), names.size()

seen = [[one.numpy() for one in step()] for _ in range(2)]
assert seen == [[b"a", 4], [b"bb", 3]], seen
assert joined().numpy() == b"cd" and words.size() == 0
assert [int(one) for one in mapped()] == [3, 6] and names.size() == 6
assert latest.numpy() == b"bb" and weight.numpy() == 6.0
assert sorted(names.export()[0].numpy().tolist()) == [b"0", b"1", b"2", b"c", b"d", b"e"]
wh.check_replicas()
print("equal")
"""


def test_strings_of_tables_and_queues_are_read_by_each_process_from_its_own(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(STRINGS), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] equal", "[1] equal"]
