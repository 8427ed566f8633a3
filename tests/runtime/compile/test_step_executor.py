"""Operations of a step run on the thread that calls it, and on another one where that thread is held up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

pytestmark = pytest.mark.core

WAIT_S = 60.0  # for another thread, where none comes


@pytest.fixture
def one_rank() -> Iterator[None]:
    wh.init()
    yield
    wh.shutdown()


def note_thread(threads: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    def note(x: np.ndarray) -> np.ndarray:
        threads.append(threading.get_ident())
        return x

    return note


def test_a_small_step_runs_where_it_is_called(one_rank: None) -> None:
    threads: list[int] = []

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3):
            x = tf.numpy_function(note_thread(threads), [x + 1], tf.float64)
        return tf.ensure_shape(x, ())

    for _ in range(50):  # another thread helps where the machine is so busy that it takes 10 ms
        threads.clear()
        assert float(step(tf.constant(1.0, tf.float64))) == 4
        if set(threads) == {threading.get_ident()}:
            return
    pytest.fail("another thread helped each time")


def test_operations_that_wait_for_each_other_get_two_threads(one_rank: None) -> None:
    meeting = threading.Barrier(2)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        def meet(x: np.ndarray) -> np.ndarray:
            meeting.wait(WAIT_S)
            return x

        return tf.add(
            *[tf.ensure_shape(tf.numpy_function(meet, [x], tf.float64, stateful=False), ()) for _ in range(2)]
        )

    for _ in range(3):
        assert float(step(tf.constant(2.0, tf.float64))) == 4


def test_a_thread_that_calls_a_step_is_not_held_up_by_another_ones(one_rank: None) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hold(x: np.ndarray) -> np.ndarray:
        begun.set()
        assert goes_on.wait(WAIT_S)
        return x

    @wh.function
    def slow(x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(hold, [x], tf.float64), ())

    @wh.function
    def quick(x: tf.Tensor) -> tf.Tensor:
        return x * 2

    x = tf.constant(3.0, tf.float64)
    goes_on.set()
    slow(x), quick(x)  # compiled here
    begun.clear(), goes_on.clear()
    with ThreadPoolExecutor(1) as other:
        held = other.submit(slow, x)
        assert begun.wait(WAIT_S)
        assert float(quick(x)) == 6
        goes_on.set()
        assert float(held.result()) == 3


def test_datasets_that_begin_in_a_step_go_on_between_steps(one_rank: None) -> None:
    read: list[int] = []

    def note(x: np.ndarray) -> np.ndarray:
        read.append(int(x))
        return x

    numbers = tf.data.Dataset.range(40).map(lambda x: tf.ensure_shape(tf.numpy_function(note, [x], tf.int64), ()))
    numbers = iter(numbers.prefetch(8))

    @wh.function
    def step(iterator: Iterator[tf.Tensor]) -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            found += next(iterator)
        return found

    assert int(step(numbers)) == 0 + 1
    begin_s = time.monotonic()
    while len(read) < 6 and time.monotonic() - begin_s < WAIT_S:
        time.sleep(0.001)
    assert len(read) >= 6  # by the prefetch, while no step runs
    assert int(step(numbers)) == 2 + 3


def test_a_step_that_fails_leaves_nothing_behind(one_rank: None) -> None:
    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        found = [tf.sqrt(x + i) for i in range(20)]
        with tf.control_dependencies([tf.debugging.assert_less(x, 2.0, "too large")]):
            return tf.add_n(found)

    good = float(step(tf.constant(1.0)))
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            step(tf.constant(3.0))
        assert float(step(tf.constant(1.0))) == good


def test_denormal_numbers_are_zero_as_in_tensorflows_threads(one_rank: None) -> None:
    tiny = tf.constant(np.full(64, 1e-42, np.float32))

    def halve(x: tf.Tensor) -> tf.Tensor:
        return x * 0.5

    np.testing.assert_array_equal(wh.function(halve)(tiny), tf.function(halve)(tiny))


def test_sessions_run_on_the_calling_thread(one_rank: None) -> None:
    threads: list[int] = []
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float64, ())
        y = tf.numpy_function(note_thread(threads), [x + 1], tf.float64)
        with wh.Session() as session:
            for _ in range(50):
                threads.clear()
                assert session.run(y, {x: 1.0}) == 2
                if set(threads) == {threading.get_ident()}:
                    return
    pytest.fail("another thread helped each time")


SCRIPT = """
import threading, tensorflow as tf, whale as wh
wh.init()
threads = set()
def note(x):
    threads.add(threading.get_ident())
    return x
@wh.function
def step(x):
    return tf.ensure_shape(tf.numpy_function(note, [x], tf.float64), ())
for _ in range(50):
    step(tf.constant(1.0, tf.float64))
print("the caller's" if threading.get_ident() in threads else "of a pool")
"""


@pytest.mark.parametrize("threads, expected", [(2, "the caller's"), (6, "of a pool")])
def test_ranks_with_more_than_four_cores_keep_tensorflows_threads(threads: int, expected: str) -> None:
    environment = os.environ | {"TF_NUM_INTRAOP_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == expected, done.stderr
