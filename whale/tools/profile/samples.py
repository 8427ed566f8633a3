"""Defines small training steps whose operations are typical of most programs, for `whale profile`.

The steps are captured and never run as a whole: their operations are measured one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from whale.capture.function import capture_function
from whale.ir.program import Program
from whale.kernels.einsums import replace_einsums
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings

# (rows, width, words) and (rows, side, channels): a small and a larger one, between which times are interpolated.
TRANSFORMERS = ((4, 128, 1024), (16, 256, 4096))
CONVOLUTIONS = ((8, 16, 16), (32, 32, 32))
LENGTH, HEADS = 64, 4


def make_programs() -> list[Program]:
    """Returns the normalised sample programs, and again with Whale's own kernel for products, which a run may turn
    off.
    """
    steps = [_make_transformer(*sizes) for sizes in TRANSFORMERS] + [
        _make_convolution(*sizes) for sizes in CONVOLUTIONS
    ]
    found = [normalise(capture_function(step, specs, {}).program, PlanSettings(size=1)) for step, specs in steps]
    return found + list(map(replace_einsums, found))


def _make_transformer(rows: int, width: int, words: int) -> tuple[Callable[..., tf.Tensor], Sequence[tf.TensorSpec]]:
    table = tf.Variable(tf.zeros((words, width)))
    weights = [tf.Variable(tf.zeros(shape)) for shape in ((width, 3 * width), (width, 4 * width), (4 * width, width))]
    weights += [tf.Variable(tf.zeros((4 * width,))), tf.Variable(tf.zeros((width, words))), table]
    update = _make_adam(weights)

    def step(tokens: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.gather(table, tokens)
            mean, variance = tf.nn.moments(hidden, -1, keepdims=True)
            normed = (hidden - mean) * tf.math.rsqrt(variance + 1e-5)
            joined = tf.reshape(tf.tensordot(normed, weights[0], 1), (rows, LENGTH, HEADS, 3 * width // HEADS))
            query, key, value = tf.split(tf.transpose(joined, (0, 2, 1, 3)), 3, axis=-1)
            scores = tf.matmul(query, key, transpose_b=True) * 0.125
            scores = tf.where(tf.linalg.band_part(tf.ones((LENGTH, LENGTH)), -1, 0) > 0, scores, -1e9)
            mixed = tf.matmul(tf.nn.softmax(scores), value)
            hidden = hidden + tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (rows, LENGTH, width))
            flat = tf.reshape(hidden, (rows * LENGTH, width))
            inner = tf.nn.gelu(tf.nn.bias_add(tf.matmul(flat, weights[1]), weights[3]))
            flat = flat + tf.tanh(tf.matmul(inner, weights[2])) * tf.sigmoid(flat)
            logits = tf.matmul(flat, weights[4])
            labels = tf.reshape(labels, (rows * LENGTH,))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        update(tape, loss)
        return loss

    spec = tf.TensorSpec((rows, LENGTH), tf.int32)
    return step, (spec, spec)


def _make_convolution(rows: int, side: int, channels: int) -> tuple[Callable[..., tf.Tensor], Sequence[tf.TensorSpec]]:
    shapes = ((3, 3, 3, channels), (3, 3, channels, 2 * channels), (1, 1, 2 * channels, channels), (channels, 10))
    weights = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    speeds = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(_normalize(tf.nn.conv2d(images, weights[0], 1, "SAME")))
            hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
            hidden = tf.nn.relu(_normalize(tf.nn.conv2d(hidden, weights[1], 1, "SAME")))
            hidden = tf.nn.relu(tf.nn.conv2d(hidden, weights[2], 2, "SAME"))
            logits = tf.matmul(tf.reduce_mean(hidden, (1, 2)), weights[3])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        for weight, speed, gradient in zip(weights, speeds, tape.gradient(loss, weights)):
            speed.assign(0.9 * speed - 0.1 * gradient)
            weight.assign_add(speed)
        return loss

    return step, (tf.TensorSpec((rows, side, side, 3)), tf.TensorSpec((rows,), tf.int32))


def _normalize(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def _make_adam(weights: Sequence[tf.Variable]) -> Callable[[tf.GradientTape, tf.Tensor], None]:
    first = [tf.Variable(tf.zeros(w.shape)) for w in weights]
    second = [tf.Variable(tf.zeros(w.shape)) for w in weights]

    def update(tape: tf.GradientTape, loss: tf.Tensor) -> None:
        for weight, m, v, gradient in zip(weights, first, second, tape.gradient(loss, weights)):
            gradient = tf.convert_to_tensor(gradient)
            m.assign_add((gradient - m) * 0.1)
            v.assign_add((tf.square(gradient) - v) * 0.001)
            weight.assign_sub(m * 0.001 / (tf.sqrt(v) + 1e-7))

    return update
