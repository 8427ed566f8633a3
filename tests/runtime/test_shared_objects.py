"""Tables and queues of a script that ranks as threads share: a step changes and reads them as one device would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import PlanError

pytestmark = pytest.mark.core

ROWS = np.arange(12.0)
MANY = pytest.mark.parametrize("count", [2, 3])


def _queue_steps(function: Callable[..., Any], weight: Any) -> list[Any]:
    queue = tf.queue.FIFOQueue(50, [tf.float64], shapes=[[]])

    @function
    def put(x: Any) -> Any:
        queue.enqueue(weight * tf.reduce_sum(x))
        return queue.size()

    @function
    def get() -> Any:
        return weight * (queue.dequeue() + 10.0 * queue.dequeue())

    @function
    def put_in_turns(x: Any) -> Any:
        for i in tf.range(3):
            queue.enqueue(weight * tf.reduce_sum(x) + tf.cast(i, tf.float64))
        if tf.reduce_sum(x) > 0.0:
            queue.enqueue(-tf.reduce_sum(x))
        else:
            queue.enqueue(tf.constant(7.0, tf.float64))
        return queue.size()

    @function
    def drain() -> Any:
        total = tf.constant(0.0, tf.float64)
        while queue.size() > 0:
            total = 0.5 * total + weight * queue.dequeue()
        return total, queue.size()

    found = [put(tf.constant(i * ROWS)) for i in range(4)]
    found += [queue.size(), get(), queue.size(), put_in_turns(tf.constant(ROWS)), put_in_turns(tf.constant(-ROWS))]
    return [*found, *drain(), queue.size()]


def _vocabulary_steps(function: Callable[..., Any], weight: Any, table: Any, scope: Callable[[], Any]) -> list[Any]:
    def turn(x: Any) -> Any:  # find, then insert what is new
        ids, _ = tf.unique(x)
        new = tf.boolean_mask(ids, tf.ensure_shape(table.lookup(ids), [None]) == 0)
        table.insert(new, table.size() + 1 + tf.range(tf.size(new, tf.int64)))
        return tf.ensure_shape(table.lookup(x), x.shape)

    @function
    def grow(x: Any) -> Any:
        with scope():
            return turn(x), tf.reduce_sum(weight * tf.cast(x, tf.float64))

    @function
    def grow_in_turns(x: Any) -> Any:
        found = x
        for i in tf.range(3):
            found = turn(x + tf.cast(i, tf.int64))
        if tf.reduce_sum(found) > 1:
            counter = tf.constant([100], tf.int64)
            table.insert(counter, table.lookup(counter) + 1)
        return found, weight

    seen: list[Any] = []
    for i in range(3):
        seen += [*grow(tf.constant(np.arange(i, i + 6))), *grow_in_turns(tf.constant(np.arange(5 * i, 5 * i + 12)))]
        seen += [table.size(), table.lookup(tf.constant([100], tf.int64))]
    return seen


def _export_steps(function: Callable[..., Any], weight: Any) -> list[Any]:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(tf.constant(list("abcde")), tf.range(5, dtype=tf.int64))

    @function
    def drop() -> Any:
        keys, values = table.export()
        order = tf.argsort(values)
        table.remove(tf.gather(keys, order)[:1])
        return tf.gather(values, order), table.size(), tf.gather(keys, order), weight * 1.0

    return [*drop(), *drop(), table.size()]


def _all_steps(function: Callable[..., Any], weight: Any, scope: Callable[[], Any]) -> list[Any]:
    def make(of: Any, **more: Any) -> Any:
        return of(tf.int64, tf.int64, 0, **more)

    found = _queue_steps(function, weight) + _export_steps(function, weight)
    found += _vocabulary_steps(function, weight, make(tf.lookup.experimental.MutableHashTable), scope)
    dense = make(tf.lookup.experimental.DenseHashTable, empty_key=-1, deleted_key=-2)
    return [np.asarray(one).tolist() for one in found + _vocabulary_steps(function, weight, dense, scope)]


@MANY
@pytest.mark.parametrize("varies", [False, True], ids=["constants", "variable"])
def test_steps_change_and_read_them_as_one_device(count: int, varies: bool, ranks: Callable[..., None]) -> None:
    weight = tf.Variable(2.0, dtype=tf.float64) if varies else tf.constant(2.0, tf.float64)
    expected = _all_steps(tf.function, weight, lambda: tf.name_scope("all"))
    ranks(count)
    assert _all_steps(wh.function, weight, wh.replica) == expected


@MANY
def test_drawn_values_are_drawn_and_inserted_once(count: int, ranks: Callable[..., None]) -> None:
    ranks(count)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0)

    @wh.function
    def draw(i: Any) -> Any:
        table.insert(i, tf.random.uniform([1], dtype=tf.float64))
        return 2.0 * table.lookup(i)

    drawn = [float(draw(tf.constant([i], tf.int64))[0]) for i in range(3)]
    assert (2.0 * table.lookup(tf.constant([0, 1, 2], tf.int64)).numpy()).tolist() == drawn
    assert len(set(drawn)) == 3


def test_micro_batches_and_stages_keep_the_order(ranks: Callable[..., None]) -> None:
    def run(function: Callable[..., Any], stage: Callable[[], Any]) -> list[Any]:
        queue = tf.queue.FIFOQueue(50, [tf.float64], shapes=[[]])
        v, w = tf.Variable(np.eye(4)), tf.Variable(np.eye(4))

        @function
        def step(x: Any) -> Any:
            with stage():
                y = x @ v
                queue.enqueue(tf.reduce_sum(y))
            with stage():
                loss = tf.reduce_mean(tf.square(y @ w))
                of_v, of_w = tf.gradients(loss, [v, w])
                v.assign_sub(0.001 * of_v)
                w.assign_sub(0.001 * of_w)
                queue.enqueue(loss)
                return loss, queue.dequeue(), queue.size()

        return [float(one) for i in range(3) for one in step(tf.constant(ROWS.reshape(3, 4).repeat(4, 0) + i))]

    expected = run(tf.function, lambda: tf.name_scope("stage"))
    ranks(4, **{"pipeline.micro_batches": 2})
    np.testing.assert_allclose(run(wh.function, wh.stage), expected, rtol=1e-12)


def test_strings_stay_on_the_first_rank_and_decide_for_all(ranks: Callable[..., None]) -> None:
    ranks(2)
    queue = tf.queue.FIFOQueue(9, [tf.string], shapes=[[]])
    queue.enqueue_many([["a", "bb", "c"]])
    weight = tf.Variable(1.0)

    @wh.function
    def step() -> Any:
        text = queue.dequeue()
        if text == "a":
            weight.assign_add(1.0)
        else:
            weight.assign_add(10.0)
        return tf.strings.length(text), text, weight + 0.0

    assert [[one.numpy() for one in step()] for _ in range(3)] == [[1, b"a", 2.0], [2, b"bb", 12.0], [1, b"c", 22.0]]
    assert queue.size() == 0
    wh.check_replicas()


def test_what_strings_of_the_first_rank_would_change_on_all_is_refused(ranks: Callable[..., None]) -> None:
    ranks(2)
    queue = tf.queue.FIFOQueue(9, [tf.string], shapes=[[]])
    queue.enqueue_many([["a", "b", "c"]])
    latest, weight = tf.Variable("none"), tf.Variable(1.0)

    @wh.function
    def assign() -> Any:
        latest.assign(queue.dequeue())
        return weight + 1.0

    @wh.function
    def joined() -> Any:
        text = tf.constant("")
        for _ in tf.range(2):
            text = tf.strings.join([text, queue.dequeue()])
            weight.assign_add(1.0)
        return text

    with pytest.raises(PlanError, match=r"a value that only the first rank has(.|\n)*string(.|\n)*`whale run`"):
        assign()
    with pytest.raises(PlanError, match=r"only the first rank runs(.|\n)*AssignAddVariableOp(.|\n)*`whale run`"):
        joined()
    assert (queue.size(), latest.numpy(), weight.numpy()) == (3, b"none", 1.0)


def test_loops_that_carry_their_strings_run_on_the_first_rank(ranks: Callable[..., None]) -> None:
    ranks(3)
    queue = tf.queue.FIFOQueue(9, [tf.string], shapes=[[]])
    queue.enqueue_many([["a", "b", "c"]])

    @wh.function
    def joined() -> Any:
        text = tf.constant("")
        for _ in tf.range(2):
            text = tf.strings.join([text, queue.dequeue()])
            if tf.strings.length(text) > 1:
                queue.enqueue(text)
        return text, tf.strings.length(text), queue.size()

    assert [one.numpy() for one in joined()] == [b"ab", 2, 2]
    assert queue.size() == 2
