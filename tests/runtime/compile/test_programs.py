"""Several programs over the same variables: steps of training and evaluation, other batch sizes, several fetch sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.oracle.metric import difference, limit

Values = dict[str, np.ndarray]
Build = Callable[[Callable[..., Any]], Values]
RATE_AND_STEPS = 0.1


@pytest.fixture(params=one_of(2, [(3, (5, 0, 3)), (2, ())]), ids=["3:5-0-3", "2"])
def spread(request: pytest.FixtureRequest, ranks: Callable[..., None]) -> None:
    size, shares = request.param
    ranks(size, **{"batch.shares": shares, "batch.norm_statistics": "batch", "batch.random": "global"})


def data(rows: int, features: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, features)), generator.integers(3, size=rows).astype(np.int32)


def as_one_device(
    program: Build, wrap: Callable[..., Any] = wh.function, plain: Callable[..., Any] = tf.function
) -> None:
    """Asserts that the program gives the same values either way."""
    results: list[Values] = []
    for function in (plain, wrap):
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(3)
        tf.keras.backend.set_floatx("float64")
        tf.keras.mixed_precision.set_global_policy("float64")
        try:
            results.append(program(function))
        finally:
            tf.keras.backend.set_floatx("float32")
            tf.keras.mixed_precision.set_global_policy("float32")
    wh.check_replicas()
    worst = difference(results[0], results[1], RATE_AND_STEPS)
    assert worst.error <= limit("float64", 0.0), worst


def weights(*owners: Any) -> Values:
    found = [v for owner in owners for v in (owner.variables() if callable(owner.variables) else owner.variables)]
    return {f"variable/{i}": np.asarray(v) for i, v in enumerate(found)}


def dense(*sizes: int, features: int) -> Any:
    layers = tf.keras.layers
    hidden = [layers.Dense(n, activation="tanh") for n in sizes[:-1]]
    return tf.keras.Sequential([layers.Input((features,)), *hidden, layers.Dense(sizes[-1])])


def keras_loops(function: Callable[..., Any]) -> Values:
    """Evaluation before the first training step, which creates the optimizer's variables; metrics over each epoch,
    whose last batches are smaller, or have fewer rows than there are ranks; a learning rate that the script changes."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Activation("tanh"), layers.Dense(3)]
    )
    optimizer = tf.keras.optimizers.Adam(1e-2, epsilon=1e-3)
    criterion = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean, right = tf.keras.metrics.Mean(dtype="float64"), tf.keras.metrics.SparseCategoricalAccuracy(dtype="float64")

    @function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean.update_state(loss, sample_weight=tf.shape(x)[0])
        return loss

    @function
    def test_step(x: tf.Tensor, y: tf.Tensor) -> None:
        logits = model(x, training=False)
        mean.update_state(criterion(y, logits), sample_weight=tf.shape(x)[0])
        right.update_state(y, logits)

    found: Values = {}
    (x, y), (held_x, held_y) = data(26), data(10, seed=1)

    def evaluate(name: str) -> None:
        for metric in (mean, right):
            metric.reset_state()
        for start in range(0, 10, 4):
            test_step(held_x[start : start + 4], held_y[start : start + 4])
        found.update({f"{name}/loss": mean.result().numpy(), f"{name}/right": right.result().numpy()})

    evaluate("before")
    for epoch in range(2):
        mean.reset_state()
        for start, end in ((0, 8), (8, 16), (16, 24), (24, 25), (25, 26)):
            train_step(x[start:end], y[start:end])
        found[f"{epoch}/loss"] = mean.result().numpy()
        evaluate(f"{epoch}/held")
        optimizer.learning_rate.assign(5e-3)
    return found | weights(model, optimizer)


def gan(function: Callable[..., Any]) -> Values:
    """Two models, two optimizers, two steps that read each other's variables and update their own."""
    generator, critic = dense(8, 4, features=2), dense(8, 1, features=4)
    adam, sgd = tf.keras.optimizers.Adam(1e-2, epsilon=1e-3), tf.keras.optimizers.SGD(1e-2, momentum=0.9)

    @function
    def critic_step(noise: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            both = critic(tf.concat([real, generator(noise)], 0))
            rows = tf.shape(real)[0]
            loss = tf.reduce_mean(tf.nn.softplus(-both[:rows])) + tf.reduce_mean(tf.nn.softplus(both[rows:]))
        adam.apply_gradients(zip(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables))
        return loss

    @function
    def generator_step(noise: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(-critic(generator(noise))))
        sgd.apply_gradients(zip(tape.gradient(loss, generator.trainable_variables), generator.trainable_variables))
        return loss

    found: Values = {}
    for index, rows in enumerate((8, 8, 3, 8)):
        noise, (real, _) = data(rows, 2, seed=index)[0], data(rows, 4, seed=10 + index)
        found[f"{index}/critic"] = critic_step(noise, real).numpy()
        found[f"{index}/generator"] = generator_step(noise[: max(1, rows - 1)]).numpy()
    return found | weights(generator, critic, adam, sgd)


def late(function: Callable[..., Any]) -> Values:
    """A step that creates a variable at its first call, and one more when it meets another batch size."""
    made: dict[int, tf.Variable] = {}
    w = tf.Variable(np.full((6, 1), 0.1))

    def step(x: tf.Tensor) -> tf.Tensor:
        rows = x.shape[0]
        if rows not in made:
            made[rows] = tf.Variable(tf.fill([1], tf.constant(0.5, tf.float64)), name=f"bias_{rows}")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w + made[rows] - 1))
        for variable, gradient in zip((w, made[rows]), tape.gradient(loss, (w, made[rows]))):
            variable.assign_sub(0.1 * gradient)
        return loss

    # tf.function lets its first trace only create variables: on one device, a function for each size.
    one = function(step)
    steps = {8: one, 2: function(step) if function is tf.function else one}
    total = function(lambda: tf.add_n([tf.reduce_sum(v) for v in (w, *made.values())]))
    found: Values = {}
    for index, rows in enumerate((8, 2, 8, 2)):
        found[f"{index}/loss"] = steps[rows](data(rows, seed=index)[0]).numpy()
    return found | {"0/total": total().numpy()} | {f"variable/{n}": v.numpy() for n, v in {0: w, **made}.items()}


@pytest.mark.parametrize("program", one_of(2, [pytest.param(keras_loops, marks=pytest.mark.core), gan, late]))
def test_steps_over_the_same_variables(spread: None, program: Build) -> None:
    as_one_device(program)


def sessions(make: Callable[..., Any]) -> Values:
    """Fetch sets that share variables: initialisers, losses alone, training, a count, values of variables."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x, y = v1.placeholder(tf.float64, [None, 6]), v1.placeholder(tf.int32, [None])
        rate = v1.placeholder_with_default(tf.constant(0.05, tf.float64), [])
        w = v1.get_variable("w", [6, 3], tf.float64, initializer=v1.constant_initializer(0.2), use_resource=True)
        extra = v1.get_variable("extra", [3], tf.float64, initializer=v1.zeros_initializer(), use_resource=True)
        count = v1.train.create_global_step()
        logits = x @ w + extra
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y), tf.int32))
        with tf.control_dependencies([count.assign_add(1)]):
            first = v1.train.MomentumOptimizer(rate, 0.9).minimize(loss, var_list=[w])
        second = v1.train.AdamOptimizer(rate).minimize(tf.square(loss), var_list=[extra])
        start = v1.global_variables_initializer()
        reset = extra.assign(tf.zeros([3], tf.float64))
    found: Values = {}
    with make(graph=graph) as session:
        session.run(start)
        for index, rows in enumerate((8, 8, 1, 8)):
            feeds = dict(zip((x, y), data(rows, seed=index)))
            found[f"{index}/before"], found[f"{index}/right"] = session.run([loss, right], feeds)
            session.run(first, feeds)
            found[f"{index}/between"], _ = session.run([loss, second], {**feeds, rate: 0.01})
            found[f"{index}/count"] = session.run(count)
            if index == 2:
                session.run(reset)
        for i, value in enumerate(session.run([w, extra])):
            found[f"variable/{i}"] = value
    return found


def test_fetch_sets_over_the_same_variables(spread: None) -> None:
    as_one_device(sessions, wh.Session, tf.compat.v1.Session)
