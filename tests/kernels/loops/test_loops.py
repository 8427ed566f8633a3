"""Loops of known length in few operations: they give what the loop as written gives, and its gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.kernels.one_rank import on_one_rank, without
from whale.ir.ops import FUSED_LOOP

Tensor = Any
ROWS, TURNS, WIDTH = 3, 5, 6
UNARY = [
    tf.tanh,
    tf.sigmoid,
    tf.square,
    tf.exp,
    tf.nn.relu,
    tf.nn.elu,
    tf.nn.softplus,
    tf.negative,
    tf.abs,
    tf.nn.relu6,
]
BINARY = [tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, tf.math.squared_difference]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def compare(body: Callable[..., Any], *given: Tensor, loops: int) -> None:
    """Compares a function on one rank with TensorFlow's, and counts the loops that were replaced."""
    expected = [value.numpy() for value in tf.function(body)(*given)]
    found, operations = on_one_rank(body, *given, **{"mesh.plan_cache": ""})
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    left = operations["While"] + operations["StatelessWhile"]
    assert (operations[FUSED_LOOP], left) == (loops, 0)


def turn(seed: int, x: Tensor, mask: Tensor, states: list[Tensor], weights: list[Tensor], time: Tensor) -> list[Tensor]:
    """Computes a turn that a seed chooses, the same each time. Returns as many states, and one tensor more."""
    draw = random.Random(seed)
    kernel, recurrent, bias, row = weights
    pool = [x, *states]
    for _ in range(draw.randrange(6, 18)):
        kind, one = draw.randrange(12), draw.choice(pool)
        if kind < 3:
            made = draw.choice(UNARY)(tf.clip_by_value(one, -2.0, 2.0))
        elif kind < 6:
            made = draw.choice(BINARY)(one, draw.choice([*pool, row, bias[:WIDTH]]))
        elif kind == 6:
            made = sum(tf.split(tf.nn.bias_add(tf.matmul(x, kernel) + tf.matmul(one, recurrent), bias), 2, 1))
        elif kind == 7:
            made = tf.matmul(one, recurrent[:, :WIDTH], transpose_b=draw.random() < 0.5)
        elif kind == 8:
            made = tf.where(draw.choice([mask, one > 0.1]), one, draw.choice(pool))
        elif kind == 9:
            made = (one - tf.reduce_mean(one, 1, keepdims=True)) * tf.math.rsqrt(
                1.0 + tf.reduce_sum(tf.square(one), 1, True)
            )
        elif kind == 10:
            half = WIDTH // 2
            made = tf.concat([one[:, half:], tf.tanh(draw.choice(pool)[:, :half])], 1)
        else:
            made = one * tf.cast(time, one.dtype) / TURNS + tf.reduce_mean(one, 0)
        pool.append(tf.clip_by_value(made, -3.0, 3.0))
    return [0.7 * old + 0.3 * tf.tanh(new) for old, new in zip(states, pool[-len(states) :])] + [pool[-1]]


def drawn_loop(seed: int) -> Callable[..., list[Tensor]]:
    """A loop over the rows of a tensor, with states, masks and weights, and what its results' gradients are."""
    draw = random.Random(seed)
    states, all_turns, backwards = draw.randrange(1, 4), draw.random() < 0.6, draw.random() < 0.3

    def run(x: Tensor, masks: Tensor, *weights: Tensor) -> list[Tensor]:
        given = [x, *weights]
        with tf.GradientTape() as tape:
            tape.watch(given)
            inputs = tf.TensorArray(x.dtype, TURNS).unstack(tf.reverse(x, [0]) if backwards else x)
            marks = tf.TensorArray(tf.bool, TURNS).unstack(masks)
            first = [tf.zeros((ROWS, WIDTH), x.dtype) + 0.1 * weights[-1] * k for k in range(states)]

            def body(time: Tensor, outputs: Any, *old: Tensor) -> tuple[Any, ...]:
                *new, more = turn(seed, inputs.read(time), marks.read(time), list(old), list(weights), time)
                return (time + 1, outputs.write(time if all_turns else 0, more), *new)

            _, outputs, *last = tf.while_loop(
                lambda time, *_: time < TURNS,
                body,
                (0, tf.TensorArray(x.dtype, TURNS if all_turns else 1, element_shape=(ROWS, WIDTH)), *first),
            )
            whole = outputs.stack()
            loss = tf.reduce_sum(tf.sin(whole)) + tf.add_n([tf.reduce_sum(tf.square(one)) for one in last])
        gradients = tape.gradient(loss, given, unconnected_gradients="zero")
        return [whole, *last, *gradients]

    return run


def drawn_tensors() -> list[Tensor]:
    draw = np.random.default_rng(0)
    sizes = (TURNS, ROWS, WIDTH), (WIDTH, 2 * WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH,), (1, WIDTH)
    x, *weights = (tf.constant(draw.normal(size=size)) for size in sizes)
    return [x, tf.constant(draw.random((TURNS, ROWS, 1)) > 0.3), *weights]


@pytest.mark.core
@pytest.mark.parametrize("seed", one_of(40, range(40)))
def test_a_drawn_loop_and_its_gradient_give_what_they_give_as_written(seed: int) -> None:
    compare(drawn_loop(seed), *drawn_tensors(), loops=2)


def keras_layers() -> list[Any]:
    """A bidirectional layer with a mask, one with states, and one that hands on its last output."""
    layers = tf.keras.layers
    options = {"return_sequences": True, "dtype": "float64"}
    return [
        layers.Bidirectional(layers.LSTM(4, **options), dtype="float64"),
        layers.GRU(5, **options),
        layers.SimpleRNN(3, dtype="float64"),
    ]


@pytest.mark.core
def test_recurrent_layers_of_keras_with_a_mask() -> None:
    tf.keras.utils.set_random_seed(0)
    stack = keras_layers()
    x = tf.constant(np.random.default_rng(0).normal(size=(ROWS, TURNS, WIDTH)))
    mask = tf.constant([[True] * 5, [True] * 3 + [False] * 2, [True, False, True, True, False]])

    def apply(x: Tensor, mask: Tensor) -> Tensor:
        for layer in stack:
            x = layer(x, mask=mask)
        return x

    apply(x, mask)
    weights = [one for layer in stack for one in layer.trainable_weights]
    values = [one if isinstance(one, tf.Variable) else one.value for one in weights]

    def run(x: Tensor, mask: Tensor) -> list[Tensor]:
        with tf.GradientTape() as tape:
            found = apply(x, mask)
            loss = tf.reduce_sum(tf.sin(found))
        return [found, *tape.gradient(loss, values)]

    compare(run, x, mask, loops=8)


@pytest.mark.core
def test_map_fn_needs_no_turns() -> None:
    """Its products are one, before any turn."""

    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            mapped = tf.map_fn(lambda row: tf.tanh(tf.matmul(row, w)), x)
        return [mapped, *tape.gradient(mapped, [x, w])]

    draw = np.random.default_rng(0)
    compare(run, tf.constant(draw.normal(size=(5, 3, 4))), tf.constant(draw.normal(size=(4, 6))), loops=0)


@pytest.mark.core
def test_what_turns_print_or_data_count_stays_a_loop() -> None:
    def printing(x: Tensor) -> list[Tensor]:
        def body(time: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            tf.debugging.assert_less(tf.abs(x), 100.0)
            return time + 1, tf.tanh(x) + 1.0

        return [tf.while_loop(lambda time, _: time < 4, body, (0, x))[1]]

    def counted(x: Tensor) -> list[Tensor]:
        return [tf.while_loop(lambda x: tf.reduce_sum(x) < 10.0, lambda x: (x * 1.5,), (x,))[0]]

    given = tf.constant([0.5, 1.0])
    for body in (printing, counted):
        expected = tf.function(body)(given)[0].numpy()
        (found,), operations = on_one_rank(body, given, **{"mesh.plan_cache": ""})
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert operations[FUSED_LOOP] == 0 and operations["While"] + operations["StatelessWhile"] == 1


@pytest.mark.core
def test_without_the_kernel_loops_stay() -> None:
    run = drawn_loop(0)
    _, operations = on_one_rank(run, *drawn_tensors(), **without("loops"))
    assert operations[FUSED_LOOP] == 0 and operations["While"] + operations["StatelessWhile"] == 2
