"""Drawn steps that draw random numbers, called with batches of many sizes, with and without others in between."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Draw = Callable[[Any, tf.Tensor], tf.Tensor]
STEPS = ("exact", "relaxed", "signature", "iterator", "fit", "fit", "fit of Keras 2", "session")

# Programs from this number on may do what TensorFlow itself does in another way each time.
RACING = 1_000_000


class State:
    """What the draws of a step keep: variables, generators, layers."""

    def __init__(self, keras: Any, keras_2: Any, function: Any) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.generator = tf.random.Generator.from_seed(5)
        self.dropout = keras.layers.Dropout(0.4, seed=3)
        self.dropout_2 = keras_2.layers.Dropout(0.4, seed=3)
        self.nested = function(_add_noise)


def _shape(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.shape(x)[0], 3])


def _loop(state: State | None, x: tf.Tensor, at_once: int = 1) -> tf.Tensor:
    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, 0.5 * total + tf.random.normal(_shape(x), dtype=x.dtype)

    return tf.while_loop(lambda i, total: i < 3, body, (0, tf.zeros_like(x)), parallel_iterations=at_once)[1]


def _branch(state: State | None, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(x) > 0 if state is None else state.count % 2 == 0,
        lambda: tf.random.normal(_shape(x), dtype=x.dtype),
        lambda: tf.random.uniform(_shape(x), dtype=x.dtype),
    )


def _add_noise(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.normal(_shape(x), dtype=x.dtype)


def _nested(state: State | None, x: tf.Tensor) -> tf.Tensor:
    called = tf.function(_add_noise) if state is None else state.nested
    return called(x) + 2 * called(x)


def _recomputed(state: State, x: tf.Tensor) -> tf.Tensor:
    return tf.recompute_grad(lambda y: tf.sin(y) * tf.random.uniform(_shape(y), seed=3, dtype=y.dtype))(x)


def _integers(state: State, x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.random.uniform(_shape(x), 2, 9, tf.int32), x.dtype)


def _categorical(state: State, x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.random.categorical(tf.zeros([tf.shape(x)[0], 4]), 3), x.dtype)


DRAWS: dict[str, Draw] = {
    "normal": lambda s, x: tf.random.normal(_shape(x), dtype=x.dtype),
    "uniform": lambda s, x: tf.random.uniform(_shape(x), dtype=x.dtype),
    "truncated": lambda s, x: tf.random.truncated_normal(_shape(x), dtype=x.dtype),
    "integers": _integers,
    "seeded": lambda s, x: tf.random.normal(_shape(x), seed=7, dtype=x.dtype),
    "gamma": lambda s, x: tf.random.gamma([tf.shape(x)[0]], tf.constant([0.5, 1.0, 3.0], x.dtype), dtype=x.dtype),
    "poisson": lambda s, x: tf.random.poisson([tf.shape(x)[0]], tf.constant([0.5, 1.0, 30.0], x.dtype), x.dtype),
    "shuffle": lambda s, x: tf.random.shuffle(tf.range(3.0 + tf.zeros([], x.dtype), dtype=x.dtype)) + tf.zeros_like(x),
    "categorical": _categorical,
    "one number": lambda s, x: tf.random.normal([], dtype=x.dtype) + tf.zeros_like(x),
    "dropout": lambda s, x: tf.nn.dropout(x, 0.4),
    "generator": lambda s, x: s.generator.normal(_shape(x), dtype=x.dtype),
    "stateless": lambda s, x: tf.random.stateless_normal(_shape(x), [s.count, 1], dtype=x.dtype),
    "loop": _loop,
    "loop of iterations at once": lambda s, x: _loop(s, x, 10),
    "branch": _branch,
    "nested": _nested,
    "recomputed": _recomputed,
    "Dropout": lambda s, x: s.dropout(x, training=True),
    "Dropout of Keras 2": lambda s, x: s.dropout_2(x, training=True),
}
IN_SESSIONS = (
    *("normal", "uniform", "truncated", "integers", "seeded", "gamma", "poisson", "categorical", "one number"),
    *("shuffle", "dropout", "loop", "branch", "nested"),
)


@dataclass(frozen=True)
class Program:
    """A step, what it draws, how many rows each of its calls has, and what happens in between."""

    step: str
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    rows: tuple[int, ...]
    evaluates: tuple[int, ...]  # before which calls
    seeds: int  # before which call TensorFlow's global seed is set once more; -1: never
    batch: int


CASES = (
    Program("fit", ("normal",), ("uniform",), (4, 3), (0,), -1, 4),
    Program("signature", ("gamma", "loop"), ("branch",), (4, 1, 3, 4), (1, 2), 3, 4),
    Program("relaxed", ("nested", "recomputed", "dropout"), ("normal",), (3, 5, 3, 2, 5), (2,), -1, 3),
    Program("fit of Keras 2", ("one number",), ("truncated",), (4, 3), (1,), -1, 3),
    Program("session", ("normal", "poisson"), ("integers",), (4, 2, 1, 4), (1, 3), -1, 4),
    Program("session", ("loop", "branch"), ("nested", "branch"), (1, 4, 2, 1), (1, 3), -1, 4),
    Program("signature", ("Dropout of Keras 2",), ("Dropout of Keras 2", "normal"), (3, 1, 2), (1, 2), -1, 4),
    Program("fit", ("seeded",), ("normal", "one number"), (8,), (0,), -1, 3),
    Program("fit", ("nested",), ("integers",), (3, 6, 2, 2, 1, 6), (1, 3), 3, 2),
)


def drawn(number: int) -> Program:
    """The program of a number; those below 0 are the cases."""
    if number < 0:
        return CASES[number]
    draw = random.Random(f"draws {number}")
    step = draw.choice(STEPS)
    names = list(IN_SESSIONS if step == "session" else DRAWS)
    if number < RACING and step != "session":
        names.remove("loop of iterations at once")
    if step == "fit":
        names.remove("Dropout of Keras 2")
    if step == "fit of Keras 2":
        names.remove("Dropout")
    rows = tuple(draw.randint(1, 6) for _ in range(draw.randint(4, 7)))
    return Program(
        step,
        tuple(draw.choice(names) for _ in range(draw.randint(1, 3))),
        tuple(draw.choice(names) for _ in range(draw.randint(1, 2))),
        rows,
        tuple(i for i in range(len(rows)) if draw.random() < 0.35),
        draw.randint(1, 3) if draw.random() < 0.2 else -1,
        draw.randint(2, 5),
    )


class Run:
    """One run of programs: plain, or over ranks."""

    def __init__(self, wh: Any, keras: Any, keras_2: Any) -> None:
        self._wh, self._keras, self._keras_2 = wh, keras, keras_2

    def __call__(self, program: Program) -> dict[str, np.ndarray]:
        """What a program gives, by call."""
        self._keras.backend.clear_session()
        self._keras.utils.set_random_seed(program.batch)
        data = np.random.default_rng(3).normal(size=(sum(program.rows), 3))
        if program.step.startswith("fit"):
            return self._fit(program, data)
        batches = np.split(data, np.cumsum(program.rows)[:-1])
        if program.step == "session":
            return self._session(program, batches)
        return self._function(program, batches)

    def _make_state(self, program: Program) -> State:
        """Returns what keeps the draws; a function that the step calls is a step itself in some programs."""
        is_step = self._wh is not None and program.batch % 2
        return State(self._keras, self._keras_2, self._wh.function if is_step else tf.function)

    def _function(self, program: Program, batches: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        state, w = self._make_state(program), tf.Variable(np.full((3, 1), 0.3))
        function = self._wh.function if self._wh is not None else tf.function
        signature = [tf.TensorSpec([None, 3], tf.float64)] if program.step == "signature" else None
        wrap = {"relaxed": {"reduce_retracing": True}, "signature": {"input_signature": signature}}

        def loss_of(names: Sequence[str], x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.square(noisy(names, state, x) @ w - 1.0))

        def step(x: Any) -> tf.Tensor:
            x = next(x) if program.step == "iterator" else x
            with tf.GradientTape() as tape:
                loss = loss_of(program.train, x)
            w.assign_sub(0.05 * tape.gradient(loss, w))
            state.count.assign_add(1)
            return loss

        train = function(step, **wrap.get(program.step, {}))
        evaluate = function(lambda x: loss_of(program.evaluate, x), **wrap.get(program.step, {}))
        iterator = iter(_stream(program, batches)) if program.step == "iterator" else None
        found = {}
        for i, x in enumerate(map(tf.constant, batches)):
            if i == program.seeds:
                tf.random.set_seed(9)
            if i in program.evaluates:
                found[f"{i}/evaluated"] = evaluate(x).numpy()
            found[f"{i}/loss"] = train(x if iterator is None else iterator).numpy()
        return found | {"w": w.numpy()}

    def _fit(self, program: Program, data: np.ndarray) -> dict[str, np.ndarray]:
        keras = self._keras if program.step == "fit" else self._keras_2
        keras.backend.set_floatx("float64")
        keras.utils.set_random_seed(program.batch)
        state = self._make_state(program)

        class Noise(keras.layers.Layer):  # type: ignore[name-defined,misc]
            def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
                return noisy(program.train if training else program.evaluate, state, x)

        noise = Noise()
        noise.dropout = state.dropout if program.step == "fit" else state.dropout_2
        model = keras.Sequential([keras.layers.Input((3,)), noise, keras.layers.Dense(1), keras.layers.Dropout(0.3)])
        steps = 1 if keras is self._keras_2 else 1 + program.batch % 2  # Keras 2 takes no fewer steps at the end
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=steps)
        y, found, size = data.sum(1, keepdims=True), {}, program.batch
        for i, rows in enumerate(program.rows[:4]):
            if i == program.seeds:
                tf.random.set_seed(9)
            given: dict[str, Any] = {"batch_size": size, "verbose": 0}
            if i in program.evaluates:
                found[f"{i}/evaluated"] = np.asarray(model.evaluate(data[: rows + 3], y[: rows + 3], **given))
                found[f"{i}/predicted"] = model.predict(data[: rows + 1], **given)
                found[f"{i}/on batch"] = np.asarray(model.train_on_batch(data[:rows], y[:rows]))
            validation = (data[:5], y[:5]) if rows % 2 else None
            history = model.fit(data, y, epochs=2, shuffle=False, validation_data=validation, **given).history
            found |= {f"{i}/{name}": np.asarray(values) for name, values in history.items()}
        return found | {f"w{i}": weight for i, weight in enumerate(model.get_weights()) if weight.dtype == np.float64}

    def _session(self, program: Program, batches: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        v1 = tf.compat.v1
        with tf.Graph().as_default():
            v1.set_random_seed(program.batch)
            x = v1.placeholder(tf.float64, [None, 3])
            w = v1.get_variable("w", [3, 1], tf.float64, v1.constant_initializer(0.3), use_resource=True)
            loss, other = (
                tf.reduce_mean(tf.square(noisy(names, None, x) @ w - 1.0))
                for names in (program.train, program.evaluate)
            )
            update = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
            found = {}
            with (self._wh.Session if self._wh is not None else v1.Session)() as session:
                session.run(v1.global_variables_initializer())
                for i, batch in enumerate(batches):
                    if i in program.evaluates:
                        found[f"{i}/evaluated"] = np.asarray(session.run(other, {x: batch}))
                        found[f"{i}/looked at"] = np.asarray(session.run(loss, {x: batch}))
                    found[f"{i}/loss"] = np.asarray(session.run([loss, update], {x: batch})[0])
                return found | {"w": session.run(w)}


def noisy(names: Sequence[str], state: Any, x: tf.Tensor) -> tf.Tensor:
    """Rows with what the named draws add to them."""
    for name in names:
        x = x + 0.3 * DRAWS[name](state, x)
    return x


def _stream(program: Program, batches: Sequence[np.ndarray]) -> tf.data.Dataset:
    """The batches, of which TensorFlow knows no number of rows."""
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=tf.TensorSpec([None, 3], tf.float64))


def run_of(wh: Any, keras: Any) -> Run:
    """Makes what runs the drawn programs; the Keras of TensorFlow 2.15 is Keras 2 itself."""
    keras_2 = keras if keras.__version__.startswith("2.") else importlib.import_module("tf_keras")
    for one in (keras, keras_2):
        one.backend.set_floatx("float64")
    return Run(wh, keras, keras_2)
