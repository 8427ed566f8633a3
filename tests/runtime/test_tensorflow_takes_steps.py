"""A ``wh.function`` where TensorFlow takes functions: saved, traced, mapped, under tapes, as a tf.function is."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError
from tensorflow.python.saved_model import load as original_load
from tensorflow.python.saved_model import save as original_save

import whale as wh
from whale.errors import ProgramError

pytestmark = pytest.mark.core
Start = Callable[..., None]
X = np.random.default_rng(0).normal(size=(6, 4))
ROWS = tf.TensorSpec([None, 4], tf.float64)
ZERO = {"memory.zero": 3, "memory.zero_min_bytes": 0}


def make_module(function: Any) -> Any:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.reshape(tf.range(12.0), [4, 3]) / 10)
            self.w = tf.Variable(tf.cast(self.w, tf.float64))
            self.late: Any = None
            self.several = [function(lambda x: tf.tanh(self(x)))]
            self.named = {"twice": function(lambda x: 2 * x)}

        @function
        def __call__(self, x: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
            return tf.matmul(x, self.w) * scale

        @function
        def train(self, x: tf.Tensor) -> tf.Tensor:
            if self.late is None:
                self.late = tf.Variable(tf.ones([3], tf.float64), trainable=False)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) + self.late) ** 2)
            self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
            self.late.assign_add(tf.ones([3], tf.float64))
            return loss

        @function(input_signature=[ROWS])
        def serve(self, x: tf.Tensor) -> Any:
            return {"scores": self(x, scale=3.0) + random.random()}

        @tf.function(input_signature=[ROWS])
        def plain(self, x: tf.Tensor) -> tf.Tensor:
            return self(x) + 1.0

    random.seed(5)
    model = Model()
    model.train(X)
    model.train(X)
    model(X)
    model(X[:2], scale=2.0)
    model.several[0](X)
    model.named["twice"](X)
    return model


def describe_saved(folder: Path) -> Any:
    """Returns what a process without Whale finds in a SavedModel: results, signatures, how often functions trace."""
    loaded = tf.saved_model.load(str(folder))
    functions = {"call": loaded.__call__, "train": loaded.train, "serve": loaded.serve, "plain": loaded.plain}
    traces = {name: len(one.concrete_functions) for name, one in functions.items()}
    served = loaded.signatures["serving_default"](tf.constant(X))["scores"]
    results = [
        loaded(X), loaded(X[:2], scale=2.0), loaded.several[0](X), loaded.named["twice"](X), loaded.plain(X[:3]),
        served, loaded.train(X), loaded.w, loaded.late,
    ]  # fmt: skip
    return traces, sorted(loaded.signatures), [one.numpy() for one in results]


@pytest.mark.parametrize("config", [{}, ZERO], ids=["replica", "zero"])
def test_a_module_is_saved_as_one_process_saves_it(ranks: Start, tmp_path: Path, config: dict[str, Any]) -> None:
    alone = make_module(tf.function)
    tf.saved_model.save(alone, str(tmp_path / "alone"), signatures=alone.serve)
    drawn = random.random()
    ranks(2, **config)
    model = make_module(wh.function)
    tf.saved_model.save(model, str(tmp_path / "ranks"), signatures=model.serve)
    assert random.random() == drawn
    assert float(model.train(X)) == pytest.approx(float(alone.train(X)), rel=1e-12)  # the run goes on
    wh.shutdown()
    (traces, signatures, results), wanted = describe_saved(tmp_path / "ranks"), describe_saved(tmp_path / "alone")
    assert (traces, signatures) == wanted[:2]
    for found, one in zip(results, wanted[2], strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-12)


def test_saving_is_replaced_under_both_names_of_its_module(ranks: Start) -> None:
    ranks(2)
    imported = importlib.import_module("tensorflow.saved_model")  # Keras' export imports it
    assert imported.save is tf.saved_model.save is not original_save.save
    assert imported.load is tf.saved_model.load is not original_load.load


def test_exports_and_checkpoints_take_steps(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    w = tf.Variable(np.ones((4, 2)))
    step = wh.function(lambda x: tf.matmul(x, w))
    module = tf.Module()
    module.w, module.predict = w, wh.function(lambda x: tf.matmul(x, w), input_signature=[ROWS])
    wh.export(module, tmp_path / "module")
    checkpoint = tf.train.Checkpoint(step=step, module=module)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    w.assign(w * 0)
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_allclose(step(X), X @ np.ones((4, 2)))
    wh.shutdown()
    loaded = tf.saved_model.load(str(tmp_path / "module"))
    np.testing.assert_allclose(loaded.signatures["serving_default"](tf.constant(X))["output_0"], X @ np.ones((4, 2)))


def test_a_trace_is_the_step_where_python_calls_it(ranks: Start) -> None:
    def make(function: Any) -> tuple[Any, tf.Variable]:
        w = tf.Variable(np.ones((4, 2)))

        @function
        def step(x: tf.Tensor, rate: float, sign: int = 1) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
            w.assign_sub(rate * sign * tape.gradient(loss, w))
            return loss

        return step, w

    def losses(step: Any) -> list[float]:
        trace = step.get_concrete_function(tf.TensorSpec([6, 4], tf.float64), 0.01, sign=-1)
        assert trace.structured_outputs.shape == [] and trace.graph.as_graph_def().node
        return [float(trace(tf.constant(X))) for _ in range(3)]

    (alone, v), (step, w) = make(tf.function), make(wh.function)
    wanted = losses(alone)
    ranks(3, **ZERO)
    np.testing.assert_allclose(losses(step), wanted, rtol=1e-12)
    np.testing.assert_allclose(w, v, rtol=1e-12)
    assert step.experimental_get_tracing_count() == alone.experimental_get_tracing_count()


def test_datasets_layers_and_loops_of_python_take_steps(ranks: Start) -> None:
    tf.random.set_seed(3)
    expected = next(iter(tf.data.Dataset.from_tensor_slices(X).map(tf.function(noisy)).batch(6)))
    ranks(2)
    tf.random.set_seed(3)
    step = wh.function(noisy)
    np.testing.assert_array_equal(next(iter(tf.data.Dataset.from_tensor_slices(X).map(step).batch(6))), expected)
    total = wh.function(lambda x: tf.reduce_sum(x))
    np.testing.assert_allclose(tf.map_fn(total, tf.constant(X)), X.sum(1))
    np.testing.assert_allclose(tf.cond(tf.constant(True), lambda: total(X), lambda: total(-X)), X.sum())

    class Doubles(keras.layers.Layer):
        @wh.function
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return 2 * x

    model = keras.Sequential([keras.Input([4]), Doubles()])
    np.testing.assert_allclose(model.predict(X, verbose=0), 2 * X, rtol=1e-6)
    with pytest.raises(ProgramError, match="decorate the outer function"):
        tf.function(lambda x: total(x), autograph=False)(tf.constant(X))


def noisy(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.uniform([4], dtype=tf.float64)


def test_steps_in_steps_draw_as_functions_in_functions(ranks: Start) -> None:
    def draw(function: Any) -> list[Any]:
        tf.random.set_seed(4)
        inner = function(lambda x: x + tf.random.normal([4], dtype=tf.float64) * random.randrange(1, 100))
        outer = function(lambda x: tf.random.uniform([4], dtype=tf.float64) + inner(x) + 2 * inner(x))
        random.seed(1)
        return [*(outer(X[:rows]) for rows in (6, 6, 4)), inner(X), random.random()]

    alone = draw(tf.function)
    ranks(2, **{"batch.random": "global"})
    for one, other in zip(draw(wh.function), alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_copies_and_name_scopes(ranks: Start) -> None:
    ranks(2)
    step = wh.function(total)
    assert float(step(X)) == float(copy.copy(step)(X)) == float(copy.deepcopy(step)(X))

    class Scoped(tf.Module):
        @tf.Module.with_name_scope
        @wh.function
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(x)

    assert float(Scoped()(X)) == pytest.approx(X.sum())


def total(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(x)


@pytest.mark.parametrize("config", [{}, ZERO], ids=["replica", "zero"])
def test_a_tape_around_steps_has_their_gradients(ranks: Start, config: dict[str, Any]) -> None:
    """A loop that decorates the call of its model, with loss and update outside; tables and inputs are watched, too."""

    def train(function: Any) -> list[Any]:
        draw = np.random.default_rng(2)
        table, w = tf.Variable(draw.normal(size=(5, 4))), tf.Variable(draw.normal(size=(4, 3)))
        made: list[tf.Variable] = []

        @function
        def call(x: tf.Tensor, ids: tf.Tensor, scale: float = 1.0) -> Any:
            if not made:
                made.append(tf.Variable(np.zeros([])))
            hidden = tf.tanh(x + tf.gather(table, ids))
            return tf.matmul(hidden, w) * scale + made[0], tf.shape(x)[0]

        found: list[Any] = []
        for rows in (1, 6, 6, 5):
            x, ids = tf.constant(X[:rows]), tf.constant(np.arange(rows) % 5)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    scores, _ = call(x, ids, scale=0.5)
                    loss = tf.reduce_mean(scores**2) + tf.reduce_sum(w**2)
                penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
                both = loss + penalty
            variables = [table, w, made[0]]
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(both, variables)]
            found += [loss, penalty, tape.gradient(loss, x), *gradients]
            for variable, gradient in zip(variables, gradients):
                variable.assign_sub(0.1 * gradient)
        return [*found, table, w]

    wanted = train(tf.function)
    ranks(2, **config)
    for one, other in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_recomputed_steps_have_gradients(ranks: Start) -> None:
    w = tf.Variable(np.ones([4, 3]))
    ranks(2)
    step = wh.function(lambda x: tf.tanh(x @ w))
    for _ in range(3):  # the first call traces the step, by which a stopped tape hears of its variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.recompute_grad(step)(tf.constant(X)))
        gradient = X.T @ (1 - np.tanh(X @ w.numpy()) ** 2)
        np.testing.assert_allclose(tape.gradient(loss, w), gradient, rtol=1e-12)


def test_what_would_not_compute_the_same_again_has_no_gradient_outside(ranks: Start) -> None:
    ranks(2)
    w = tf.Variable(np.ones((4, 2)))

    def forward(x: tf.Tensor) -> None:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
            step(x)

    counted = tf.Variable(0.0, trainable=False)

    def counts(x: tf.Tensor) -> tf.Tensor:
        counted.assign_add(1.0)
        return tf.matmul(x, w)

    for fn, why in (
        (lambda x: tf.nn.dropout(tf.matmul(x, w), 0.5), "RandomUniform"),
        (counts, "AssignAddVariableOp"),
    ):
        with tf.GradientTape() as tape:
            loss = wh.function(fn)(X)
        with pytest.raises(ProgramError, match=rf"tape outside of a step(.|\n)*{why}(.|\n)*inside the function"):
            tape.gradient(loss, w)
    step = wh.function(lambda x: tf.matmul(x, w) ** 2)
    for asks in (lambda tape, y, x: tape.batch_jacobian(y, x), lambda tape, y, x: forward(x)):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = step(x)
        with pytest.raises((ProgramError, StagingError), match=r"while a graph is built|ForwardAccumulator"):
            asks(tape, y, x)
    for changes in (lambda: w.assign_add(w), lambda: w.assign(w + 1.0)):
        with tf.GradientTape() as tape:
            loss = step(X)
        changes()
        with pytest.raises(ProgramError, match="have changed since the call"):
            tape.gradient(loss, w)
