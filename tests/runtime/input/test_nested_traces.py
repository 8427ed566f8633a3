"""Steps inside other steps: TensorFlow reuses their traces, so they keep the Python values of the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.capture.open_sizes import find_open_shape, note_open_shape

X = np.random.default_rng(0).normal(size=(20, 4))


class Scaled(tf.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.scale, self.taken = function, 1.0, []
        self.loss = function(lambda x: tf.reduce_mean(x**2) * self.scale)

    def take(self, step: Callable[..., Any], *arguments: Any) -> None:
        self.taken.append(float(step(*arguments)))

    def of_rows(self, **options: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = self.function(lambda x: self.loss(x * 2.0), **options)
        return made

    def of_iterator(self, rows: int) -> Callable[..., Any]:
        iterator = iter(tf.data.Dataset.from_tensor_slices(X).batch(rows).repeat())
        made: Callable[..., Any] = self.function(lambda: self.loss(next(iterator)))
        return made


def rows_known_first(a: Scaled) -> None:
    a.take(a.of_rows(), X[:8])
    a.scale = 2.0
    a.take(a.of_iterator(8))
    a.scale = 3.0
    a.take(a.of_iterator(5))
    for rows in (8, 7):
        a.take(a.of_rows(), tf.constant(X[:rows]))


def rows_unknown_first(a: Scaled) -> None:
    a.take(a.of_iterator(8))
    a.scale = 2.0
    for rows in (8, 5):
        a.take(a.of_rows(), tf.constant(X[:rows]))
    a.take(a.loss, tf.constant(X[:3]))


def signatures(a: Scaled) -> None:
    spec = [tf.TensorSpec([None, 4], tf.float64)]
    for scale in (1.0, 2.0):
        a.scale = scale
        step = a.of_rows(input_signature=spec)
        for rows in (8, 5):
            a.take(step, tf.constant(X[:rows]))


def relaxed_retracing(a: Scaled) -> None:
    step = a.of_rows(reduce_retracing=True)
    for scale, rows in ((1.0, 8), (2.0, 6), (3.0, 5)):
        a.scale = scale
        a.take(step, tf.constant(X[:rows]))
    for rows in (9, 8):
        a.take(a.of_rows(), tf.constant(X[:rows]))


def traced_by_hand(a: Scaled) -> None:
    a.loss.get_concrete_function(tf.TensorSpec([None, 4], tf.float64))
    a.scale = 2.0
    a.take(a.of_rows(), tf.constant(X[:8]))
    a.take(a.loss, tf.constant(X[:6]))


def in_a_loop(a: Scaled) -> None:
    iterator = iter(tf.data.Dataset.from_tensor_slices(X).batch(6).repeat())

    @a.function
    def step(n: Any) -> Any:
        total = tf.zeros([], tf.float64)
        for _ in tf.range(n):
            total += a.loss(next(iterator))
        return total

    a.take(step, tf.constant(2))
    a.scale = 2.0
    a.take(a.of_rows(), tf.constant(X[:8]))


class Loss(keras.layers.Layer):
    def __init__(self, owner: Scaled) -> None:
        super().__init__(dtype="float64")
        self.compute = owner.loss

    def call(self, x: Any) -> Any:
        return x * 0.0 + self.compute(x)


def in_a_layer_of_keras(a: Scaled) -> None:
    a.take(a.of_iterator(8))
    a.scale = 2.0
    model = keras.Sequential([keras.Input((4,), dtype="float64"), Loss(a)])
    model.compile("sgd", "mse")
    a.taken += model.predict(X, batch_size=8, verbose=0)[:, 0].tolist()
    a.scale = 3.0
    a.taken += model.predict(X, batch_size=7, verbose=0)[:, 0].tolist()


def first_in_a_layer_of_keras(a: Scaled) -> None:
    model = keras.Sequential([keras.Input((4,), dtype="float64"), Loss(a)])  # finds shapes by a trace
    model.compile("sgd", "mse")
    a.scale = 2.0
    a.taken += model.predict(X, batch_size=8, verbose=0)[:, 0].tolist()
    a.take(a.of_rows(), tf.constant(X[:8]))


CASES = (
    rows_known_first,
    rows_unknown_first,
    signatures,
    relaxed_retracing,
    traced_by_hand,
    in_a_loop,
    in_a_layer_of_keras,
    first_in_a_layer_of_keras,
)


def train(function: Callable[..., Any], case: Callable[[Scaled], None]) -> list[float]:
    owner = Scaled(function)
    case(owner)
    return owner.taken


def test_a_nested_step_keeps_the_values_of_its_trace(ranks: Callable[..., None]) -> None:
    expected = [train(tf.function, case) for case in CASES]
    ranks(2)
    for case, wanted in zip(CASES, expected, strict=True):
        np.testing.assert_allclose(train(wh.function, case), wanted, rtol=1e-10, err_msg=case.__name__)


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x * 2.0,
    "columns": lambda x: tf.transpose(x),
    "products": lambda x: tf.matmul(x, tf.ones([4, 3])),
    "first rows": lambda x: x[:4],
    "sums": lambda x: tf.reduce_sum(x, 0),
    "joined": lambda x: tf.concat([x, x], 0),
    "sizes": lambda x: tf.reshape(x, [tf.shape(x)[0], 2, 2]),
    "sizes that Python reads": lambda x: tf.reshape(x, [x.shape[0] or -1, 2, 2]),
    "flat": lambda x: tf.reshape(x, [-1]),
    "some rows": lambda x: tf.boolean_mask(x, x[:, 0] > 0.0),
    "branches": lambda x: tf.cond(x[0, 0] > 0.0, lambda: x * 2.0, lambda: x),
    "constants": lambda x: tf.ones([8, 4]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_shapes_of_one_device(name: str) -> None:
    shapes: list[Any] = []

    def known(x: Any) -> None:
        note_open_shape(x, (None, 4))
        shapes.append(find_open_shape(COMPUTED[name](x)))

    tf.function(known).get_concrete_function(tf.TensorSpec([8, 4]))
    tf.function(lambda x: shapes.append(COMPUTED[name](x).shape)).get_concrete_function(tf.TensorSpec([None, 4]))
    assert shapes[0].as_list() == shapes[1].as_list()
