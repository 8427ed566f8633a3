"""Draws without a seed are alike on all ranks, and still at random."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import random_seed as operation_seeds
from tensorflow.python.ops import stateful_random_ops

from whale.distributed.common_seeds import CommonSeeds, compute_state_number, read_random_state, take_random_state
from whale.runtime.input.shuffle_orders import read_graph

# Keras 2 beside Keras 3, which TensorFlow has from 2.16 on.
tf_keras = pytest.importorskip("tf_keras")


def _of_keras2() -> Any:
    return tf_keras.backend.random_normal([3])


def _of_global_generator() -> Any:
    return tf.random.get_global_generator().normal([3])


# What a script draws that names no seed, and how one rank alone disturbs it before wh.init().
LEFT_OPEN: dict[str, Callable[[], Any]] = {
    "random": lambda: [random.random() for _ in range(3)],
    "random.shuffle": lambda: random.sample(range(100), 9),
    "numpy": lambda: np.random.normal(size=3),
    "numpy, whole numbers": lambda: np.random.permutation(50),
    "keras 3": lambda: keras.random.normal([3]),
    "keras 3, an initializer": lambda: keras.initializers.GlorotUniform()([3, 3]),
    "keras 3, a layer": lambda: keras.layers.Dropout(0.5)(np.ones([40]), training=True),
    "keras 2": _of_keras2,
    "keras 2, an initializer": lambda: tf_keras.initializers.GlorotUniform()([3, 3]),
    "tensorflow's global generator": _of_global_generator,
}


@pytest.fixture(autouse=True)
def as_found() -> Any:
    """No test draws what another one left."""
    state = read_random_state()
    yield
    take_random_state(state)


@pytest.mark.parametrize("what", LEFT_OPEN)
@pytest.mark.parametrize("before", ["nothing drawn", "drawn before"])
def test_what_a_script_draws_without_a_seed_is_the_first_ranks(what: str, before: str) -> None:
    draw = LEFT_OPEN[what]
    if before == "drawn before":
        draw()
    state = read_random_state()
    found = []
    for disturbed in (False, True):
        if disturbed:  # another process, in which more was drawn
            tf_keras.utils.set_random_seed(7)
            keras.utils.set_random_seed(7)
            tf.random.set_seed(None)
            for other in LEFT_OPEN.values():
                other()
        seeds = CommonSeeds(take_random_state(state))
        found.append([np.asarray(draw()) for _ in range(2)])
        seeds.take_back()
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(*found[0]), "the same numbers again"


# Each draws anew whenever it is called, so that no state of a module decides.
UNSEEDED: dict[str, Callable[[], Any]] = {
    "uniform": lambda: tf.random.uniform([4]),
    "normal": lambda: tf.random.normal([4]),
    "shuffle": lambda: tf.random.shuffle(tf.range(60)),
    "categorical": lambda: tf.random.categorical(tf.zeros([1, 1000]), 5),
    "default_rng": lambda: np.random.default_rng().normal(size=4),
    "RandomState": lambda: np.random.RandomState().rand(4),
    "PCG64": lambda: np.random.Generator(np.random.PCG64()).permutation(40),
    "Generator": lambda: tf.random.Generator.from_non_deterministic_state().normal([4]),
    "Random": lambda: [random.Random().random() for _ in range(2)],
    "uuid4": lambda: list(uuid.uuid4().bytes),
    "uuid1": lambda: list(uuid.uuid1().bytes),
    "dataset": lambda: np.stack([n.numpy() for n in tf.data.Dataset.range(30).shuffle(30)]),
}


def in_a_process(number: int, draw: Callable[[], Any]) -> list[Any]:
    """Draws twice in a run whose first rank drew this number."""
    tf_context.context().clear_kernel_cache()
    seeds = CommonSeeds(number)
    try:
        return [np.asarray(draw()) for _ in range(2)]
    finally:
        seeds.take_back()


@pytest.mark.parametrize("what", UNSEEDED)
def test_what_has_no_seed_draws_alike_on_all_ranks(what: str) -> None:
    draw = UNSEEDED[what]
    of_ranks = [in_a_process(5, draw) for _ in range(2)]
    np.testing.assert_array_equal(*of_ranks)
    assert not np.array_equal(*of_ranks[0]), "the same numbers again"
    assert not np.array_equal(of_ranks[0], in_a_process(6, draw)), "another run draws the same"


def test_uuids_of_libraries_stay_a_processes_own() -> None:
    make = eval(compile("lambda: uuid.uuid4()", f"{os.sep}site-packages{os.sep}library.py", "eval"), {"uuid": uuid})
    of_ranks = [in_a_process(5, lambda: list(make().bytes)) for _ in range(2)]
    assert not np.array_equal(*of_ranks)


def test_ranks_that_bring_data_of_their_own_draw_for_themselves() -> None:
    found = []
    for _ in range(2):
        tf_context.context().clear_kernel_cache()
        seeds = CommonSeeds(5)
        seeds.leave_draws_to_ranks()
        found.append([np.random.default_rng().normal(size=3), tf.random.uniform([3]).numpy()])
        seeds.take_back()
    assert not np.array_equal(*found)


def test_what_has_a_seed_keeps_it_and_all_is_put_back() -> None:
    draws = [lambda: tf.random.stateless_uniform([3], [1, 2]), lambda: np.random.default_rng(4).normal(size=3)]
    numpy: Any = np.random.bit_generator
    kept = [numpy.randbits, stateful_random_ops.non_deterministic_ints, operation_seeds.get_seed]
    before = [draw() for draw in draws]
    seeds = CommonSeeds(5)
    np.testing.assert_array_equal(before, [draw() for draw in draws])
    assert operation_seeds.get_seed(3) == (operation_seeds.DEFAULT_GRAPH_SEED, 3)
    tf.random.set_seed(8)
    here = tf.random.uniform([3])
    seeds.take_back()
    tf.random.set_seed(8)
    np.testing.assert_array_equal(here, tf.random.uniform([3]))
    assert kept == [
        numpy.randbits,
        stateful_random_ops.non_deterministic_ints,
        operation_seeds.get_seed,
    ]
    assert compute_state_number(read_random_state()) != compute_state_number(read_random_state())


def _sloppy(source: tf.data.Dataset) -> tf.data.Dataset:
    return source.apply(tf.data.experimental.parallel_interleave(lambda x: tf.data.Dataset.range(2), 2, sloppy=True))


@pytest.mark.core
@pytest.mark.parametrize(
    "make",
    [
        lambda source: source.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False),
        lambda source: source.batch(2, num_parallel_calls=2, deterministic=False),
        lambda source: source.interleave(lambda x: tf.data.Dataset.range(2), num_parallel_calls=2, deterministic=False),
        _sloppy,
    ],
    ids=["map", "batch", "interleave", "sloppy"],
)
def test_datasets_that_leave_their_order_open_get_one(make: Callable[[tf.data.Dataset], tf.data.Dataset]) -> None:
    source = tf.data.Dataset.range(8)

    def made() -> tuple[bytes, list[Any]]:
        dataset = make(source)
        return read_graph(dataset)[0].attr["deterministic"].s, sorted(map(str, dataset.as_numpy_iterator()))

    order, samples = made()
    seeds = CommonSeeds(5)
    in_order, the_same = made()
    seeds.take_back()
    assert (order, in_order) == (b"false", b"true") and samples == the_same and made()[0] == order


@pytest.mark.core
def test_options_that_leave_the_order_open_give_one() -> None:
    options = tf.data.Options()
    options.deterministic, options.autotune.cpu_budget = False, 1
    seeds = CommonSeeds(5)
    found = tf.data.Dataset.range(2).with_options(options).options()
    seeds.take_back()
    assert found.deterministic and found.autotune.cpu_budget == 1 and not options.deterministic
