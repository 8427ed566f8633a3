"""Programs of TensorFlow 1, as scripts for one device have them: each builds a graph, runs it, returns numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

Numbers = list[float]
Program = Callable[[str], Numbers]
PROGRAMS: dict[str, Program] = {}
ROWS, FEATURES = 12, 4


def program(function: Program) -> Program:
    """Adds a program to the table, by its name."""
    PROGRAMS[function.__name__] = function
    return function


def batches(count: int = 3, rows: int = ROWS) -> list[np.ndarray]:
    """The data of all programs."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=(rows, FEATURES)) for _ in range(count)]


def numbers(value: Any) -> Numbers:
    """All numbers of a fetched value, in order."""
    return [float(n) for leaf in tf.nest.flatten(value) if leaf is not None for n in np.ravel(np.asarray(leaf))]


def joined(lists: Iterable[Numbers]) -> Numbers:
    """All numbers of several lists."""
    return [number for one in lists for number in one]


def weight(name: str = "weight", shape: Sequence[int] = (FEATURES, 3), dtype: Any = tf.float64, **more: Any) -> Any:
    """A variable with numbers that are equal everywhere."""
    value = np.random.default_rng(0).normal(size=tuple(shape))
    return tf.get_variable(name, shape, dtype, tf.constant_initializer(value), **more)


def linear(dtype: Any = tf.float64) -> tuple[Any, Any]:
    """(placeholder, loss) of a linear model."""
    x = tf.placeholder(dtype, [None, FEATURES], "x")
    return x, tf.reduce_mean(tf.square(x @ weight(dtype=dtype) - 1.0))


def trained(x: Any, fetches: Any, count: int = 3) -> Numbers:
    """What a session fetches in some steps, and all variables after them."""
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        found = [numbers(session.run(fetches, {x: rows})) for rows in batches(count)]
        return [*joined(found), *numbers(session.run(tf.global_variables()))]


def _optimizer(name: str, make: Callable[[], Any], dtype: Any = tf.float64) -> None:
    def run(folder: str) -> Numbers:
        x, loss = linear(dtype)
        step = tf.train.get_or_create_global_step()
        train = make().minimize(loss, step)
        return trained(x, [loss, train])

    PROGRAMS[f"optimizer_{name}"] = run


_optimizer("sgd", lambda: tf.train.GradientDescentOptimizer(0.1))
_optimizer("momentum", lambda: tf.train.MomentumOptimizer(0.1, 0.9))
_optimizer("nesterov", lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True))
_optimizer("adam", lambda: tf.train.AdamOptimizer(0.1))
_optimizer("adagrad", lambda: tf.train.AdagradOptimizer(0.1))
_optimizer("adagrad_da", lambda: tf.train.AdagradDAOptimizer(0.1, tf.train.get_global_step()))
_optimizer("adadelta", lambda: tf.train.AdadeltaOptimizer(0.1))
_optimizer("ftrl", lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01))
_optimizer("rmsprop", lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5))
_optimizer("rmsprop_centered", lambda: tf.train.RMSPropOptimizer(0.1, centered=True))
_optimizer(
    "proximal_sgd", lambda: tf.train.ProximalGradientDescentOptimizer(0.1, l1_regularization_strength=0.01), tf.float32
)
_optimizer(
    "proximal_adagrad", lambda: tf.train.ProximalAdagradOptimizer(0.1, l2_regularization_strength=0.01), tf.float32
)
_optimizer("sync_replicas", lambda: _sync_replicas())


def _sync_replicas() -> Any:
    """Beside one process, which stands for what the wrapped optimizer computes of the global batch."""
    inner = tf.train.MomentumOptimizer(0.1, 0.9)
    return tf.train.SyncReplicasOptimizer(inner, 2) if os.environ.get("TF1_TABLE_SPREAD") else inner


def _decay(name: str, make: Callable[[Any], Any]) -> None:
    def run(folder: str) -> Numbers:
        x, loss = linear()
        step = tf.train.get_or_create_global_step()
        rate = tf.cast(make(step), tf.float64)
        return trained(x, [loss, rate, tf.train.GradientDescentOptimizer(rate).minimize(loss, step)], 4)

    PROGRAMS[f"decay_{name}"] = run


_decay("exponential", lambda step: tf.train.exponential_decay(0.1, step, 2, 0.5, staircase=True))
_decay("piecewise", lambda step: tf.train.piecewise_constant(step, [1, 2], [0.1, 0.05, 0.01]))
_decay("polynomial", lambda step: tf.train.polynomial_decay(0.1, step, 10, cycle=True))
_decay("inverse_time", lambda step: tf.train.inverse_time_decay(0.1, step, 2, 0.5))
_decay("natural_exp", lambda step: tf.train.natural_exp_decay(0.1, step, 2, 0.5))
_decay("cosine", lambda step: tf.train.cosine_decay(0.1, step, 10))
_decay("linear_cosine", lambda step: tf.train.linear_cosine_decay(0.1, step, 10))


def _loss(name: str, make: Callable[[Any, Any], Any]) -> None:
    def run(folder: str) -> Numbers:
        x = tf.placeholder(tf.float64, [None, FEATURES])
        made = make(tf.nn.sigmoid(x[:, :3]), tf.nn.sigmoid(x @ weight()))
        total = tf.losses.get_total_loss()
        return trained(x, [made, total, tf.train.GradientDescentOptimizer(0.1).minimize(total)])

    PROGRAMS[f"loss_{name}"] = run


_loss("mean_squared_error", lambda y, p: tf.losses.mean_squared_error(y, p))
_loss("absolute_difference", lambda y, p: tf.losses.absolute_difference(y, p, weights=2.0))
_loss("cosine_distance", lambda y, p: tf.losses.cosine_distance(y, p, axis=1))
_loss("hinge", lambda y, p: tf.losses.hinge_loss(tf.round(y), p))
_loss("huber", lambda y, p: tf.losses.huber_loss(y, p, delta=0.3))
_loss("log", lambda y, p: tf.losses.log_loss(tf.cast(y, tf.float32), tf.cast(p, tf.float32)))
_loss(
    "mean_pairwise", lambda y, p: tf.losses.mean_pairwise_squared_error(tf.cast(y, tf.float32), tf.cast(p, tf.float32))
)
_loss("sigmoid_cross_entropy", lambda y, p: tf.losses.sigmoid_cross_entropy(y, p))
_loss("softmax_cross_entropy", lambda y, p: tf.losses.softmax_cross_entropy(tf.nn.softmax(y), p, label_smoothing=0.1))
_loss("sparse_softmax", lambda y, p: tf.losses.sparse_softmax_cross_entropy(tf.argmax(y, 1), p))
_loss("weighted_by_rows", lambda y, p: tf.losses.mean_squared_error(y, p, weights=tf.round(y[:, :1])))


def _metric(name: str, make: Callable[[Any, Any], Any]) -> None:
    def run(folder: str) -> Numbers:
        x = tf.placeholder(tf.float64, [None, FEATURES])
        labels, values = tf.cast(x[:, 0] > 0, tf.int64), tf.cast(tf.nn.sigmoid(x[:, 1]), tf.float32)
        value, update = make(labels, values)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            found = [numbers(session.run(update, {x: rows})) for rows in batches()]
            return [*joined(found), *numbers(session.run(value))]

    PROGRAMS[f"metric_{name}"] = run


_metric("accuracy", lambda y, p: tf.metrics.accuracy(y, tf.cast(p > 0.5, tf.int64)))
_metric("auc", lambda y, p: tf.metrics.auc(y, p, num_thresholds=20))
_metric("mean", lambda y, p: tf.metrics.mean(p))
_metric("mean_iou", lambda y, p: tf.metrics.mean_iou(y, tf.cast(p > 0.5, tf.int64), 2))
_metric("precision_recall", lambda y, p: tuple(zip(tf.metrics.precision(y, p > 0.5), tf.metrics.recall(y, p > 0.5))))
_metric("root_mean_squared", lambda y, p: tf.metrics.root_mean_squared_error(tf.cast(y, tf.float32), p))


@program
def partitioned_variable(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    with tf.variable_scope("parts", partitioner=tf.fixed_size_partitioner(2)):
        parts = tf.get_variable("weight", [FEATURES, 3], tf.float64, tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(x @ tf.convert_to_tensor(parts)))
    return trained(x, [loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)])


@program
def partitioned_embedding(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    with tf.variable_scope("table", partitioner=tf.min_max_variable_partitioner(3, min_slice_size=32)):
        table = tf.get_variable("table", [10, 3], tf.float64, tf.ones_initializer())
    rows = tf.cast(tf.abs(x) * 3, tf.int64)
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows, partition_strategy="div")))
    return trained(x, [loss, tf.train.AdagradOptimizer(0.1).minimize(loss)])


@program
def reuse(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    with tf.variable_scope("shared"):
        first = tf.tanh(x @ weight())
    with tf.variable_scope("shared", reuse=True):
        second = tf.tanh((x + 1) @ weight())
    with tf.variable_scope("shared", reuse=tf.AUTO_REUSE):
        loss = tf.reduce_mean(tf.square(first - second + x @ weight()))
    return trained(x, [loss, tf.train.AdamOptimizer(0.1).minimize(loss)])


@program
def template(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    layer = tf.make_template("layer", lambda v: tf.tanh(v @ weight("w", (FEATURES, FEATURES))))
    loss = tf.reduce_mean(layer(layer(x)))
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def regularizer_and_custom_getter(folder: str) -> Numbers:
    def double(getter: Any, *args: Any, **kwargs: Any) -> Any:
        return getter(*args, **kwargs) * 2.0

    x = tf.placeholder(tf.float64, [None, FEATURES])
    loss = tf.reduce_mean(tf.square(x @ weight(regularizer=lambda w: 0.1 * tf.nn.l2_loss(w))))
    with tf.variable_scope("doubled", custom_getter=double):
        loss += tf.reduce_mean(x @ weight())
    loss += tf.losses.get_regularization_loss()
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def layers(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    first = tf.layers.Dense(
        5, tf.nn.tanh, kernel_initializer=tf.constant_initializer(0.1), name="first", dtype=tf.float64
    )
    loss = tf.reduce_mean(tf.square(tf.layers.dense(first(x), 1, kernel_initializer=tf.constant_initializer(0.2))))
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def layers_of_images(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    image = tf.reshape(tf.concat([x] * 4, 1), [-1, 4, 4, 1])
    made = tf.layers.conv2d(image, 2, 3, padding="same", kernel_initializer=tf.constant_initializer(0.1))
    made = tf.layers.flatten(tf.layers.max_pooling2d(tf.nn.relu(made), 2, 2))
    loss = tf.reduce_mean(tf.square(tf.layers.dense(made, 1, kernel_initializer=tf.constant_initializer(0.2))))
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def batch_normalization(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    normal = tf.layers.batch_normalization(x @ weight(), training=True)
    loss = tf.reduce_mean(tf.square(normal - 1.0) * tf.cumsum(tf.ones_like(normal), 1))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    return trained(x, [loss, train])


@program
def dropout_that_is_seeded(folder: str) -> Numbers:
    """Off while it is compared: its kernel draws by the place in memory, another on each rank."""
    x = tf.placeholder(tf.float64, [None, FEATURES])
    loss = tf.reduce_mean(tf.square(tf.layers.dropout(x @ weight(), 0.5, seed=3, training=False)))
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def moving_average(folder: str) -> Numbers:
    x, loss = linear()
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    average = tf.train.ExponentialMovingAverage(0.9, step)
    with tf.control_dependencies([train]):
        both = average.apply(tf.trainable_variables())
    return trained(x, [both, average.average(tf.trainable_variables()[0])])


@program
def moving_average_of_a_tensor(folder: str) -> Numbers:
    x, loss = linear()
    average = tf.train.ExponentialMovingAverage(0.9, zero_debias=True)
    return trained(x, [average.apply([loss]), average.average(loss)])


@program
def fetched_beside_its_update(folder: str) -> Numbers:
    x, loss = linear()
    step = tf.train.get_or_create_global_step()
    return trained(x, [tf.train.AdamOptimizer(0.1).minimize(loss, step), step, tf.trainable_variables()[0]])


@program
def clipped_gradients(folder: str) -> Numbers:
    x, loss = linear()
    optimizer = tf.train.AdamOptimizer(0.1)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
    return trained(x, [norm, optimizer.apply_gradients(zip(clipped, variables))])


@program
def accumulated_gradients(folder: str) -> Numbers:
    x, loss = linear()
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    ((gradient, variable),) = optimizer.compute_gradients(loss)
    kept = tf.get_variable("kept", variable.shape, tf.float64, tf.zeros_initializer(), trainable=False)
    add = tf.assign_add(kept, gradient)
    with tf.control_dependencies([add]):
        now = tf.identity(kept.read_value())
    with tf.control_dependencies([optimizer.apply_gradients([(now, variable)])]):
        clear = tf.group(tf.assign(kept, tf.zeros_like(kept)))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for rows in batches(3):
            session.run(add, {x: rows})
        session.run(clear, {x: batches(1)[0]})
        return numbers(session.run(tf.global_variables()))
