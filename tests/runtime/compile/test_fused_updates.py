"""The kernels "updates": optimizers' arithmetic in few operations gives the same bits as in TensorFlow's many."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.kernels.one_rank import without
from whale.frontends.tf1 import session
from whale.ir.ops import ASSIGNS
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.kernels.updates import UPDATE
from whale.partition.lower import add_memory, lower_shown_ranks
from whale.passes.normalize import collapse_updates
from whale.runtime.compile.compile import compile_program
from whale.runtime.compile.settings import settings_of
from whale.runtime.context import require_current

v1 = tf.compat.v1
Start = Callable[..., None]
SCHEDULE: dict[str, Any] = {"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.5}
# What Keras 3 and Keras 2 both have; None: a rate that decays.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": None}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"learning_rate": None, "global_clipnorm": 0.5}),
    "amsgrad": ("Adam", {"amsgrad": True, "clipvalue": 0.01}),
    "adamw": ("AdamW", {"clipnorm": 0.1, "use_ema": True, "ema_overwrite_frequency": 2}),
    "rmsprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
    "lion": ("Lion", {}),
}
STEPS = 3


@pytest.fixture(autouse=True)
def _as_written() -> Iterator[None]:
    """TensorFlow's optimizer computes x / sqrt(y) as x * rsqrt(y): it leaves alone what is compared with."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


class Models:
    """A small model for each optimizer; one step trains them all."""

    def __init__(self, keras: Any, names: tuple[str, ...], dtype: str, scope: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(0)
        self.dtype, self.pairs = dtype, []
        for name in names:
            layers = [keras.layers.Dense(n, activation="tanh", dtype=dtype) for n in (6, 2)]
            for layer, width in zip(layers, (4, 6)):
                layer.build((None, width))
            kind, options = OPTIMIZERS.get(name, (name, {}))
            rate = options.get("learning_rate", 0.01) or keras.optimizers.schedules.ExponentialDecay(**SCHEDULE)
            optimizer = getattr(keras.optimizers, kind)(**{**options, "learning_rate": rate})
            optimizer.build([w for layer in layers for w in layer.trainable_variables])
            self.pairs.append((layers, optimizer))

        @wh.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0, dtype)
            for layers, optimizer in self.pairs:
                with tf.GradientTape() as tape:
                    hidden = x
                    with scope():
                        for layer in layers:
                            hidden = layer(hidden)
                    loss = tf.reduce_mean(tf.square(hidden - y))
                weights = [w for layer in layers for w in layer.trainable_variables]
                optimizer.apply_gradients(list(zip(tape.gradient(loss, weights), weights)))
                total += loss
            return total

        self.step = step

    def batch(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        generator = np.random.default_rng(number)
        x, y = generator.normal(size=(8, 4)), generator.normal(size=(8, 2))
        return tf.constant(x, self.dtype), tf.constant(y, self.dtype)

    def train(self) -> None:
        for number in range(STEPS):
            self.step(*self.batch(number))

    def program(self) -> Program:
        """What the first rank runs."""
        return self.step._step(self.batch(0), {}).compiled.ranks[0]

    def values(self) -> dict[str, np.ndarray]:
        found = {}
        for i, (layers, optimizer) in enumerate(self.pairs):
            variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
            held = [w for layer in layers for w in layer.weights] + list(variables)
            found.update({f"{i}, {k}": tf.convert_to_tensor(v).numpy() for k, v in enumerate(held)})
        return found


def written(program: Program) -> Counter[str]:
    """Operations of updates, and other writes of variables of more than one element."""
    found = Counter(UPDATE for n in program.nodes if n.op == UPDATE)
    writes = (n for n in program.nodes if n.op in ASSIGNS)
    found["alone"] = sum(program.find_type(n.inputs[1]).elements > 1 for n in writes)
    return found


def same_bits(ranks: Start, make: Callable[[], Models], count: int = 1, **config: Any) -> tuple[Program, Program]:
    """Trains with and without fused updates, and compares all that is held; the programs of the first rank."""
    programs, values = [], []
    for fused in (True, False):
        ranks(count, **without("elementwise", *[] if fused else ["updates"]), **config)
        models = make()
        models.train()
        programs.append(models.program())
        values.append(models.values())
        wh.shutdown()
    fused_values, plain = values
    assert fused_values.keys() == plain.keys() and len(plain) > 4 * len(models.pairs)
    for (name, value), other in zip(fused_values.items(), plain.values()):
        assert np.all(np.isfinite(other)), name
        assert (value.dtype, value.tobytes()) == (other.dtype, other.tobytes()), f"{name}: {value} {other}"
    assert written(programs[1])[UPDATE] == 0
    return programs[0], programs[1]


@pytest.mark.core
@pytest.mark.parametrize("dtype", one_of(2, ["float32", "float64"]))
def test_optimizers_give_the_same_bits(ranks: Start, dtype: str) -> None:
    fused, plain = same_bits(ranks, lambda: Models(tf.keras, tuple(OPTIMIZERS), dtype, contextlib.nullcontext))
    assert written(plain)["alone"] >= 4 * 2 * len(OPTIMIZERS)
    # Keras 2's RMSprop in float32 takes reciprocal square roots, which are left to TensorFlow, between two updates.
    assert written(fused)["alone"] == 0
    assert len(OPTIMIZERS) <= written(fused)[UPDATE] <= len(OPTIMIZERS) + 1
    assert len(fused.nodes) < 0.5 * len(plain.nodes)


@pytest.mark.long
def test_keras_2s_optimizers_give_the_same_bits(ranks: Start) -> None:
    import tf_keras

    fused, _ = same_bits(ranks, lambda: Models(tf_keras, tuple(OPTIMIZERS), "float64", contextlib.nullcontext))
    assert written(fused) == {UPDATE: len(OPTIMIZERS), "alone": 0}


@pytest.mark.parametrize(
    ("scope", "config"),
    one_of(
        2,
        [
            (contextlib.nullcontext, {"memory.zero": 1, "memory.zero_min_bytes": 0}),
            (contextlib.nullcontext, {"memory.zero": 3, "memory.zero_min_bytes": 0}),
            (lambda: wh.split(), {}),
            (contextlib.nullcontext, {"pipeline.micro_batches": 2}),
        ],
        several=True,
    ),
    ids=["zero 1", "zero 3", "split", "micro-batches"],
)
def test_parts_of_variables_give_the_same_bits(ranks: Start, scope: Any, config: dict[str, Any]) -> None:
    names = ("adam", "Lamb" if hasattr(tf.keras.optimizers, "Lamb") else "adamax")
    fused, plain = same_bits(ranks, lambda: Models(tf.keras, names, "float64", scope), 2, **config)
    assert written(fused)["alone"] == 0 < written(plain)["alone"]
    assert written(fused)[UPDATE] >= len(names)


@pytest.mark.parametrize(
    ("scope", "config"),
    [
        (contextlib.nullcontext, {"memory.zero": 1, "memory.zero_min_bytes": 0}),
        *one_of(
            3,
            [
                (lambda: wh.split(), {}),
                (wh.replica, {}),
                (contextlib.nullcontext, {"memory.zero": 2, "memory.zero_min_bytes": 0}),
                (contextlib.nullcontext, {"memory.zero": 3, "memory.zero_min_bytes": 0}),
                (contextlib.nullcontext, {"pipeline.micro_batches": 2}),
            ],
            several=True,
        ),
    ],
    ids=["zero 1", "split", "replica", "zero 2", "zero 3", "micro-batches"],
)
def test_updates_that_are_collapsed_before_they_are_planned_give_the_same_bits(
    ranks: Start, monkeypatch: pytest.MonkeyPatch, scope: Any, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(collapse_updates, "MANY", 1)
    names = ("adam", "adamw")
    planned: list[Counter[str]] = []

    def make() -> Models:
        models = Models(tf.keras, names, "float64", scope)
        planned.append(written(models.step._step(models.batch(0), {}).compiled.program))
        return models

    fused, _ = same_bits(ranks, make, 2, **config)
    assert planned[0][UPDATE] == 4 * len(names) and planned[0]["alone"] == planned[1][UPDATE] == 0
    assert written(fused)["alone"] == 0 and len(names) <= written(fused)[UPDATE] <= 4 * len(names)


def test_averages_in_a_session_give_the_same_bits(ranks: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = compile_program(*args, **kwargs)
        programs.extend(found.ranks)
        return found

    monkeypatch.setattr(session, "compile_program", noted)
    values = []
    for fused in (True, False):
        ranks(1, **without("elementwise", *[] if fused else ["updates"]))
        draw = np.random.default_rng(0)
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float64, [None, 4])
            weights = [v1.get_variable(f"w{n}", initializer=draw.normal(size=(4, 4)), use_resource=True) for n in "ab"]
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ weights[0]) @ weights[1] - 1))
            trained = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            with tf.control_dependencies([trained]):
                step = v1.train.ExponentialMovingAverage(0.9).apply(weights)
            with wh.Session() as running:
                running.run(v1.global_variables_initializer())
                for _ in range(STEPS):
                    running.run(step, {x: draw.normal(size=(3, 4))})
                values.append([value.tobytes() for value in running.run(v1.global_variables())])
        wh.shutdown()
    assert len(values[0]) == 6
    assert values[0] == values[1]
    assert sum(written(program)[UPDATE] for program in programs) == 1


def test_a_plan_tells_of_them(ranks: Start) -> None:
    told = []
    for fused in (True, False):
        ranks(1, **without("elementwise", *[] if fused else ["updates"]))
        models = Models(tf.keras, ("adam",), "float64", contextlib.nullcontext)
        context = require_current("test")
        compiled = models.step._step(models.batch(0), {}).compiled
        settings = settings_of(context)
        told.append(add_memory(compiled.plan, lower_shown_ranks(compiled.program, compiled.plan, settings), settings))
        wh.shutdown()
    assert [plan.updates for plan in told] == [(1, 12), (0, 0)]
    assert plan_from_json(told[0].to_json()).updates == (1, 12)
    assert "Updates  12 variables written by 1 operation on rank 0" in format_plan(told[0])
    assert "Updates" not in format_plan(told[1])
