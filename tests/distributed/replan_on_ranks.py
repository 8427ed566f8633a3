"""Script for `whale run`: trains under one strategy after the other, beside one device.

replan_on_ranks.py function|fit|profile STEPS [STRATEGY...]

STRATEGY: rows, state, stages, split, alone, lent: the run goes over to each after some steps, from the first one.
With `profile` nothing is planted, and `mesh.profile` decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy, ParallelStrategy
from whale.passes.pass_manager import normalise
from whale.planner.graph_search import strategies
from whale.planner.graph_search.environment import Slowdown
from whale.planner.graph_search.pipelines import pipelines, work_of_chain
from whale.planner.graph_search.strategies import choices, divide_over_all
from whale.runtime.compile import auto, forecast, step
from whale.runtime.compile.auto import SearchedAgain
from whale.runtime.compile.settings import settings_of
from whale.runtime.context import Context, require_current

WIDTH, ROWS = 64, 24
how, steps, wanted = sys.argv[1], int(sys.argv[2]), iter(sys.argv[3:])


def find_strategy(program: Program, context: Context, kind: str) -> ParallelStrategy:
    size, settings = context.size, settings_of(context)
    normal = normalise(program, settings)
    if kind == "stages":
        work = work_of_chain(normal, lambda node: 1.0)
        return pipelines(normal, size, ROWS, work, [1.0] * size, 2, "1f1b", ())[0]
    if kind == "lent":
        return divide_over_all("rank 0 alone", size, lent_threads=2)
    if kind == "state":
        return divide_over_all("state divided", size, zero=3)
    found = choices(normal, size, None)
    fits: dict[str, Callable[[ParallelStrategy], bool]] = {
        "rows": lambda one: not (one.replicated or one.split),
        "alone": lambda one: one.replicated,
        "split": lambda one: bool(one.split),
    }
    return next(one for one in found if fits[kind](one))


def plant() -> None:
    """Has the strategies taken in turn, each after a few steps of the one before."""
    strategies.LEAST_BYTES = 1
    forecast.FIRST, forecast.STEPS = 1, 2
    forecast.is_far = lambda *_: True  # type: ignore[assignment]

    def choose(program: Program, settings: Any, context: Context, *_: Any) -> tuple[ChosenStrategy, None]:
        return ChosenStrategy(find_strategy(program, context, next(wanted)), 1.0), None

    def search_again(program: Program, context: Context, *_: Any) -> SearchedAgain:
        better = ChosenStrategy(find_strategy(program, context, next(wanted)), 0.5)
        return SearchedAgain(better, 1e3, Slowdown(), True, 1e12, 1e12, 0.0)

    auto._agree = choose  # type: ignore[assignment]
    step.search_again = search_again  # type: ignore[assignment]


class Dropout(tf.keras.layers.Layer):  # type: ignore[misc]
    """Draws from a stream of TensorFlow's, which is no variable."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.random.uniform(tf.shape(x), dtype=x.dtype) < 0.25, tf.zeros_like(x), x)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(number)
    return draw.normal(size=(ROWS, 6)), draw.normal(size=(ROWS, 4))


def make_model() -> Any:
    tf.keras.utils.set_random_seed(3)
    layers = tf.keras.layers
    hidden = [layer for _ in range(2) for layer in (layers.Dense(WIDTH, activation="tanh"), Dropout())]
    model = tf.keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(4)])
    model.compile(tf.keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", jit_compile=False)
    return model


def train(function: Callable[..., Any], steps: int, is_enough: Callable[[int], bool] = lambda taken: False) -> Any:
    """Returns losses, weights and slots after all steps, or fewer."""
    model, losses = make_model(), list[float]()
    if how == "fit":
        rows = [np.concatenate(parts) for parts in zip(*(batch(number) for number in range(steps // 2)))]
        data = tf.data.Dataset.from_tensor_slices(tuple(rows)).shuffle(64, seed=1).batch(ROWS)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    else:
        weights, optimizer = model.trainable_variables, model.optimizer
        optimizer.build(weights)

        @function
        def take(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        while len(losses) < steps and not is_enough(len(losses)):
            losses.append(float(take(*batch(len(losses)))))
    variables = [*model.variables, *model.optimizer.variables]
    return {"losses": losses} | {f"variable {i}": v.numpy() for i, v in enumerate(variables)}


tf.keras.backend.set_floatx("float64")
alone = train(tf.function, steps) if how == "fit" else None
wh.init({"mesh.auto_parallel": True, "batch.random": "global"})
if how != "profile":
    plant()
planning = require_current("the script").planning
# Some steps more than until it has moved, or has had the time to.
found = train(wh.function, steps, lambda taken: how == "profile" and planning.moves == 1 and taken % 16 == 0)
assert planning.auto is not None
for name, value in (alone or train(tf.function, len(found["losses"]))).items():
    np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10, err_msg=name)
wh.check_replicas()
print(f"rank {wh.rank()}: {planning.moves} moves, at last {planning.auto.strategy.name}", flush=True)
wh.shutdown()
