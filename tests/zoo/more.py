"""Programs that look at the batch as a whole: rows that meet other rows, loops and branches over rows, slices of the
batch, gradients of gradients, host functions. Each was once divided wrongly, refused, or not divided."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting, function_program
from tests.zoo.keras_step import classifier_batch, cross_entropy, dense_gradients
from tests.zoo.modules import Layers, Updater
from tests.zoo.optimizers import learning_rate

FEATURES, WIDTH, CLASSES, BUCKETS = 10, 12, 4, 9

Loss = Callable[[Layers, tf.Tensor, tf.Tensor], tf.Tensor]


def _program(setting: Setting, loss: Loss, **shapes: tuple[int, ...]) -> Program:
    """A classifier's step with this loss over (weights, x, y), and the update written by hand."""
    layers = Layers(setting.dtype, w1=(FEATURES, WIDTH), w2=(WIDTH, CLASSES), **shapes)
    trained = list(layers.weights.values())
    updater = Updater(setting.optimizer, trained)

    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with setting.scope(), tf.GradientTape() as tape:
            found = loss(layers, x, y)
        gradients = tape.gradient(found, trained)
        updater.apply(gradients, trained)
        return {"loss": found} | dense_gradients(setting, gradients)

    return function_program(
        setting,
        step,
        ("x", "y"),
        classifier_batch(setting, (FEATURES,), CLASSES),
        lambda: [*trained, *updater.variables],
        learning_rate(setting.optimizer),
    )


def _through(transform: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[[Setting], Program]:
    """Two layers with ``transform(hidden, y)`` between them."""

    def build(setting: Setting) -> Program:
        def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            hidden = tf.tanh(tf.matmul(x, layers["w1"]))
            return cross_entropy(y, tf.matmul(transform(hidden, y), layers["w2"]))

        return _program(setting, loss)

    return build


def _halves(hidden: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """The batch cut in two and joined the other way round, of a shape that is asserted."""
    first, second = tf.split(tf.ensure_shape(hidden, [BATCH, WIDTH]), 2, axis=0)
    return hidden + 0.5 * tf.concat([second, first], axis=0)


def _experts(hidden: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Rows go to one of two functions and come back to their places."""
    places = tf.dynamic_partition(tf.range(BATCH), y % 2, 2)
    parts = tf.dynamic_partition(hidden, y % 2, 2)
    return tf.reshape(tf.dynamic_stitch(places, [2.0 * parts[0], tf.tanh(parts[1])]), [BATCH, WIDTH])


def _scanned(hidden: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Each row depends on those before it; all rows on the last state. Lists of rows meet in the gradient."""
    running = tf.scan(lambda state, row: 0.5 * state + row, hidden)
    return running + 0.1 * tf.foldl(lambda state, row: 0.9 * state + row, hidden)


def _scaled_by_maximum(hidden: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """A branch reduces over the batch, and its gradient needs what it reduced."""
    return tf.cond(tf.reduce_max(hidden) > 0.5, lambda: hidden / (1.0 + tf.reduce_max(hidden)), lambda: 2.0 * hidden)


def _counted_on_host(hidden: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """A NumPy function runs once; what it returns are rows of the batch."""
    mask = tf.numpy_function(lambda labels: (labels > 0).astype(np.int32), [y], tf.int32)
    mask.set_shape([BATCH])
    return hidden * tf.cast(1 + mask, hidden.dtype)[:, None]


def contrastive(setting: Setting) -> Program:
    """Every row is compared with every other row of the batch."""

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def embed(rows: tf.Tensor) -> tf.Tensor:
            return tf.math.l2_normalize(tf.matmul(tf.tanh(tf.matmul(rows, layers["w1"])), layers["w2"]), axis=1)

        similarity = tf.matmul(embed(x), embed(1.1 * x + 0.1), transpose_b=True)
        return cross_entropy(tf.range(BATCH), 5.0 * similarity)

    return _program(setting, loss)


def hard_triplets(setting: Setting) -> Program:
    """The farthest row of the same class and the nearest of another are gathered from the batch."""

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        rows = tf.matmul(tf.tanh(tf.matmul(x, layers["w1"])), layers["w2"])
        distance = tf.reduce_sum(tf.square(rows[:, None] - rows[None]), axis=-1)
        alike = tf.cast(y[:, None] == y[None], rows.dtype)
        near, far = tf.argmin(distance + 1e3 * alike, axis=1), tf.argmax(distance * alike, axis=1)

        def gap(index: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(tf.square(rows - tf.gather(rows, index)), axis=1)

        return tf.reduce_mean(tf.nn.softplus(gap(far) - gap(near)))

    return _program(setting, loss)


def gradient_penalty(setting: Setting) -> Program:
    """The norm of the gradient for the inputs is part of the loss: second derivatives."""

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = cross_entropy(y, tf.matmul(tf.tanh(tf.matmul(x, layers["w1"])), layers["w2"]))
        norm = tf.norm(tape.gradient(found, x), axis=1)
        return found + tf.reduce_mean(tf.square(norm - 1.0))

    return _program(setting, loss)


def micro_batches(setting: Setting) -> Program:
    """The step cuts the batch by itself and adds the losses of the parts."""

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        found = []
        for start in range(0, BATCH, BATCH // 2):
            rows = slice(start, start + BATCH // 2)
            logits = tf.matmul(tf.tanh(tf.matmul(x[rows], layers["w1"])), layers["w2"])
            found.append(cross_entropy(y[rows], logits))
        return tf.add_n(found) / len(found)

    return _program(setting, loss)


def words(setting: Setting) -> Program:
    """Labels become strings, and these become numbers of rows in a table."""

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        text = tf.strings.join([tf.strings.as_string(y), "word"], separator="-")
        bucket = tf.strings.to_hash_bucket_fast(text, BUCKETS)
        hidden = tf.tanh(tf.matmul(x, layers["w1"]) + tf.gather(layers["table"], bucket))
        return cross_entropy(y, tf.matmul(hidden, layers["w2"]))

    return _program(setting, loss, table=(BUCKETS, WIDTH))


MORE_CASES = (
    Case("halves", _through(_halves), optimizers=("sgd",), rows_commute=False),
    Case("experts", _through(_experts), optimizers=("sgd",)),
    Case("scan_over_rows", _through(_scanned), optimizers=("sgd",), rows_commute=False),
    Case("branch_on_maximum", _through(_scaled_by_maximum), optimizers=("sgd",)),
    Case("numpy_function", _through(_counted_on_host), optimizers=("sgd",)),
    Case("contrastive", contrastive),
    Case("hard_triplets", hard_triplets, optimizers=("sgd",)),
    Case("gradient_penalty", gradient_penalty),
    Case("micro_batches", micro_batches, optimizers=("sgd",), rows_commute=False),
    Case("words", words, optimizers=("sgd",)),
)
