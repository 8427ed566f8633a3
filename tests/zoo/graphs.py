"""TF1 graphs: v1 optimizers, clipping by global norm, `losses`, `layers` with update ops, `dynamic_rnn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, SEED, Case, Program, Setting, graph_program
from tests.zoo.keras_step import classifier_batch
from tests.zoo.optimizers import learning_rate, v1_optimizer

v1 = tf.compat.v1

FEATURES, WIDTH, CLASSES = 12, 16, 4


def _dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[-1], units], x.dtype, v1.glorot_uniform_initializer())
        bias = v1.get_variable("bias", [units], x.dtype, v1.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _mean_present(losses: tf.Tensor, weights: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Mean over the elements of non-zero weight, which is what `losses` computes; added to the losses collection.

    `tf.compat.v1.losses` sums in float32 whatever it is given. In float64 the same formula is written out here, so
    that float64 is exact to its own rounding.
    """
    if losses.dtype == tf.float32:
        return v1.losses.compute_weighted_loss(losses, weights)
    weighted = losses * weights
    present = tf.cast(tf.math.count_nonzero(tf.broadcast_to(weights, tf.shape(losses))), losses.dtype)
    found = tf.math.divide_no_nan(tf.reduce_sum(weighted), present)
    v1.losses.add_loss(found)
    return found


def _classifier_loss(labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | float = 1.0) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return _mean_present(losses, tf.convert_to_tensor(weights, logits.dtype))


def _program(
    setting: Setting,
    shapes: Mapping[str, tuple[Any, tuple[int | None, ...]]],
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]],
    loss: Callable[..., Mapping[str, tf.Tensor]],
    clip: float | None = None,
) -> Program:
    """Builds the graph: placeholders, loss, gradients (clipped), update with a global step, update ops before it."""
    graph = tf.Graph()
    with graph.as_default(), setting.scope():
        v1.set_random_seed(SEED)
        placeholders = {name: v1.placeholder(dtype, shape, name) for name, (dtype, shape) in shapes.items()}
        results = dict(loss(*placeholders.values()))
        optimizer = v1_optimizer(setting.optimizer)
        pairs = optimizer.compute_gradients(results["loss"])
        if clip is not None:
            gradients, norm = tf.clip_by_global_norm([gradient for gradient, _ in pairs], clip)
            pairs = [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs, strict=True)]
            results["norm"] = norm
        step = v1.train.get_or_create_global_step()
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            train = optimizer.apply_gradients(pairs, global_step=step)
        if setting.gradients:
            for index, (gradient, _) in enumerate(pairs):
                if isinstance(gradient, tf.Tensor):
                    results[f"gradient/{index:03d}"] = gradient
    return graph_program(setting, graph, results, train, placeholders, make_batch, learning_rate(setting.optimizer))


def _classifier(setting: Setting, shape: tuple[int, ...], rows: int | None) -> tuple[Any, Any]:
    shapes = {"x": (setting.dtype, (rows, *shape)), "y": (tf.int32, (rows,))}
    return shapes, classifier_batch(setting, shape, CLASSES)


def mlp(setting: Setting) -> Program:
    """Batch of unknown size in the placeholders; `losses` with weights (counts what is present), L2, clipping."""
    shapes, batch = _classifier(setting, (FEATURES,), None)

    def loss(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = _dense(tf.nn.relu(_dense(x, WIDTH, "hidden")), CLASSES, "logits")
        present = tf.cast(tf.not_equal(y, 0), x.dtype)
        _classifier_loss(y, logits, present)
        for kernel in v1.trainable_variables():
            if "kernel" in kernel.name:
                v1.add_to_collection(v1.GraphKeys.REGULARIZATION_LOSSES, 0.01 * tf.nn.l2_loss(kernel))
        right = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y)
        return {"loss": v1.losses.get_total_loss(), "correct": tf.math.count_nonzero(right)}

    return _program(setting, shapes, batch, loss, clip=0.3)


def losses(setting: Setting) -> Program:
    """Four `losses` with three reductions, static batch. They compute in float32, whatever they are given."""
    shapes, _ = _classifier(setting, (FEATURES,), BATCH)
    shapes["y"] = (setting.dtype, (BATCH, CLASSES))

    def loss(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        output = _dense(tf.tanh(_dense(x, WIDTH, "hidden")), CLASSES, "output")
        weights = tf.nn.relu(x[:, :1])
        found = [
            v1.losses.mean_squared_error(y, output),
            v1.losses.huber_loss(y, output, weights, reduction=v1.losses.Reduction.MEAN),
            v1.losses.absolute_difference(y, output, weights),
            v1.losses.softmax_cross_entropy(tf.nn.softmax(y), output, reduction=v1.losses.Reduction.SUM),
        ]
        return {"loss": tf.add_n(found)} | {f"loss_{index}": value for index, value in enumerate(found)}

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": generator.normal(size=(BATCH, FEATURES)).astype(setting.dtype),
            "y": generator.normal(size=(BATCH, CLASSES)).astype(setting.dtype),
        }

    return _program(setting, shapes, batch, loss)


def convolution(setting: Setting) -> Program:
    """Convolution with a hand-written moving average of moments, kept by update ops."""
    shapes, batch = _classifier(setting, (8, 8, 3), None)

    def loss(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        kernel = v1.get_variable("kernel", [3, 3, 3, 8], x.dtype, v1.truncated_normal_initializer(stddev=0.3))
        hidden = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
        mean, variance = tf.nn.moments(hidden, axes=[0, 1, 2])
        moving = v1.get_variable("moving_mean", [8], x.dtype, v1.zeros_initializer(), trainable=False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(moving, 0.1 * (moving - mean)))
        normed = tf.nn.relu(tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3))
        pooled = tf.nn.max_pool2d(normed, 2, 2, "VALID")
        logits = _dense(tf.reshape(pooled, [-1, 4 * 4 * 8]), CLASSES, "logits")
        return {"loss": _classifier_loss(y, logits)}

    return _program(setting, shapes, batch, loss)


def layers(setting: Setting) -> Program:
    """`tf.compat.v1.layers` with fused batch norm and its update ops. Keras 3 removed these layers."""
    shapes, batch = _classifier(setting, (8, 8, 3), None)

    def loss(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        hidden = v1.layers.conv2d(x, 8, 3, padding="same", use_bias=False)
        hidden = tf.nn.relu(v1.layers.batch_normalization(hidden, training=True, momentum=0.9))
        logits = v1.layers.dense(v1.layers.flatten(v1.layers.max_pooling2d(hidden, 2, 2)), CLASSES)
        return {"loss": _classifier_loss(y, logits)}

    return _program(setting, shapes, batch, loss)


class Cell:
    """A gated cell in the form that `dynamic_rnn` asks for, without the Keras classes that Keras 3 removed."""

    state_size = output_size = WIDTH

    def __init__(self, features: int, dtype: tf.DType) -> None:
        self.kernel = v1.get_variable("cell", [features + WIDTH, 2 * WIDTH], dtype, v1.glorot_uniform_initializer())

    def zero_state(self, batch_size: Any, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros([batch_size, WIDTH], dtype)

    def __call__(self, inputs: tf.Tensor, state: tf.Tensor, scope: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
        gate, value = tf.split(tf.matmul(tf.concat([inputs, state], 1), self.kernel), 2, axis=1)
        update = tf.sigmoid(gate)
        new = update * state + (1 - update) * tf.tanh(value)
        return new, new


def dynamic_rnn(setting: Setting) -> Program:
    """`dynamic_rnn` over rows of different length: TensorArrays in a while loop of control flow v2."""
    shapes, plain = _classifier(setting, (5, 6), BATCH)
    shapes["length"] = (tf.int32, (BATCH,))

    def loss(x: tf.Tensor, y: tf.Tensor, length: tf.Tensor) -> dict[str, tf.Tensor]:
        _, state = v1.nn.dynamic_rnn(Cell(6, x.dtype), x, sequence_length=length, dtype=x.dtype)
        return {"loss": _classifier_loss(y, _dense(state, CLASSES, "logits"))}

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return plain(generator) | {"length": generator.integers(1, 6, size=BATCH).astype(np.int32)}

    return _program(setting, shapes, batch, loss, clip=1.0)


CASES = (
    Case("tf1_mlp", mlp),
    Case("tf1_momentum", mlp, optimizers=("momentum",)),
    Case("tf1_rmsprop", mlp, optimizers=("rmsprop",)),
    Case("tf1_adagrad", mlp, optimizers=("adagrad",)),
    Case("tf1_ftrl", mlp, optimizers=("ftrl",)),
    Case("tf1_losses", losses, dtypes=("float32",)),
    Case("tf1_convolution", convolution),
    Case("tf1_layers", layers, flavours=("keras2",)),
    Case("tf1_dynamic_rnn", dynamic_rnn, heavy=True, row_inputs=("x", "y", "length")),
)
