"""``wh.function`` is called as tf.function is, with the same meaning, in all forms of a decorator."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import whale as wh
from whale.errors import CaptureError
from whale.runtime.function import Function

pytestmark = pytest.mark.core

X = np.arange(12.0, dtype=np.float32).reshape(6, 2)
ROWS = tf.TensorSpec([None, 2], tf.float32)


def total(x: Any, factor: Any = 2) -> Any:
    if isinstance(factor, tf.Tensor):  # a tensor only where a signature makes it one
        factor = factor + 100
    return tf.reduce_sum(tf.cast(x, tf.float32)) * tf.cast(factor, tf.float32)


def test_it_has_the_parameters_of_tf_function() -> None:
    ours, theirs = inspect.signature(wh.function).parameters, inspect.signature(tf.function).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"input_signature": [ROWS]},
        {"input_signature": [ROWS, tf.TensorSpec([], tf.int32)]},
        {"autograph": False},
        {"jit_compile": True},
        {"jit_compile": False},
        {"reduce_retracing": True},
        {"experimental_implements": "sum"},
        {"experimental_autograph_options": tf.autograph.experimental.Feature.EQUALITY_OPERATORS},
        {"experimental_relax_shapes": True},
        {"experimental_follow_type_hints": True},
    ],
    ids=str,
)
def test_keywords_mean_what_they_mean_to_tensorflow(ranks: Callable[..., None], keywords: dict[str, Any]) -> None:
    ranks(3)
    # experimental_implements makes tensors of numbers, which computes the same.
    fn = total if "experimental_implements" not in keywords else lambda x, factor=2: total(x, 2)
    expected = float(tf.function(fn, **keywords)(X))
    steps = [wh.function(fn, **keywords), wh.function(**keywords)(fn), wh.function(func=fn, **keywords)]
    assert [float(step(X)) for step in steps] == [expected] * 3
    assert steps[0].plan(X).batch_inputs[0].placement.sizes == (2, 2, 2)


def test_a_signature_by_position_and_its_sizes(ranks: Callable[..., None]) -> None:
    ranks(2)
    step = wh.function(total, (ROWS, tf.TensorSpec([], tf.int64)))
    assert float(step(X)) == float(step(X.astype(np.float64), 2)) == float(step(X.tolist(), factor=np.int64(2)))
    assert float(step(X[:3], 4)) == float(X[:3].sum()) * 104
    assert len(step._steps) == 2, "a step for each number of rows, none for a number that is a tensor"
    for given in (X[0], X[:, :1], tf.constant(X, tf.float64), "text"):
        with pytest.raises(CaptureError, match="input_signature"):
            step(given)


def test_without_autograph_conditions_over_tensors_are_errors(ranks: Callable[..., None]) -> None:
    def positive(x: Any) -> Any:
        if tf.reduce_sum(x) > 0:
            return x
        return -x

    ranks(2)
    assert wh.function(positive)(-X).numpy().tolist() == X.tolist()
    with pytest.raises(Exception, match="AutoGraph"):
        wh.function(positive, autograph=False)(X)
    outer = wh.function(lambda x: wh.function(positive, autograph=False)(x))
    with pytest.raises(Exception, match="AutoGraph"):
        outer(X)


def test_methods_keep_their_keywords(ranks: Callable[..., None]) -> None:
    class Model:
        scale = 3.0

        @wh.function(input_signature=[ROWS, tf.TensorSpec([], tf.int32)], jit_compile=True)
        def step(self, x: Any, factor: Any = 2) -> Any:
            return total(x, factor) * self.scale

    ranks(2)
    model = Model()
    assert float(model.step(X.astype(np.float64))) == float(X.sum()) * 102 * 3.0
    outer = wh.function(lambda x: model.step(x, 1))
    assert float(outer(X)) == float(X.sum()) * 101 * 3.0


def test_autograph_rewrites_a_step_that_another_one_calls(
    ranks: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    @wh.function
    def doubled(x: Any) -> Any:
        while tf.reduce_sum(x) < 1000:
            x = x * 2
        return x

    @wh.function
    def outer(x: Any) -> Any:
        return doubled(x) + 1

    ranks(2)
    assert outer(X).numpy().tolist() == (X * 16 + 1).tolist()
    assert "AutoGraph" not in caplog.text


def test_what_it_was_made_of(ranks: Callable[..., None]) -> None:
    assert wh.function(total).python_function is total
    assert wh.function(tf.function(total)).python_function is total
    ranks(2)
    assert float(wh.function(wh.function(total))(X)) == float(X.sum()) * 2


def test_a_models_train_step_may_be_one(ranks: Callable[..., None]) -> None:
    """Keras calls it inside its own step."""

    def history(function: Any) -> list[float]:
        class Model(tf.keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = tf.keras.layers.Dense(1, kernel_initializer="ones")

            def call(self, x: Any) -> Any:
                return self.dense(x)

            @function
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                slopes = tape.gradient(loss, self.trainable_variables)
                if loss > 0:
                    loss = loss * 2
                self.optimizer.apply_gradients(zip(slopes, self.trainable_variables))
                return {"loss": loss}

        model = Model()
        model.compile(tf.keras.optimizers.SGD(0.001))
        found = model.fit(X, X[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [float(loss) for loss in found]

    expected = history(tf.function)
    ranks(2)
    np.testing.assert_allclose(history(wh.function), expected, rtol=1e-5)


def test_what_was_compiled_of_a_step_goes_with_it() -> None:
    def known() -> set[str]:
        gc.collect()
        return {name for name in tf_context.context().list_function_names() if "doubled" in str(name)}

    @wh.function
    def doubled(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(2 * x)

    wh.init({"communication.in_process_ranks": 2})
    try:
        with wh.replica():
            assert doubled(tf.ones((4, 2))) == 16
            assert doubled(tf.ones((6, 2))) == 24
        assert known()
        del doubled
        assert not known()
    finally:
        wh.shutdown()


def test_sizes_of_one_trace_are_traced_with_the_same_draws_of_python(ranks: Callable[..., None]) -> None:
    """Keras 2's random operations without a seed take one of NumPy's global generator while they are traced."""

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x) * 0.0 + np.random.randint(1000) + 1000 * random.randrange(1000)

    def run(function: Callable[..., Any]) -> list[float]:
        random.seed(3)
        np.random.seed(3)
        found = [float(function(tf.ones([rows]))) for rows in (4, 4, 3, 2)]
        return [*found, np.random.uniform(), random.random()]

    expected = run(tf.function(step, input_signature=[tf.TensorSpec([None])]))
    ranks(2)
    assert run(Function(step, one_trace=True)) == expected
