"""Layers that are too large for one device, as users write them: experts, and a classifier with a margin."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, Case, Program, Setting
from tests.zoo.keras_step import classifier_batch, cross_entropy
from tests.zoo.modules import Layers, _program

TOKENS, FEATURES, HIDDEN, EXPERTS, CLASSES = 4, 6, 10, 3, 20


def experts(setting: Setting) -> Program:
    """Each token goes to one expert; a row of the batch is a group, whose capacity drops nothing."""
    layers = Layers(
        setting.dtype, router=(FEATURES, EXPERTS), into=(EXPERTS, FEATURES, HIDDEN), out=(EXPERTS, HIDDEN, FEATURES),
        head=(FEATURES, CLASSES),
    )  # fmt: skip

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        chances = tf.nn.softmax(tf.einsum("gtd,de->gte", x, layers["router"]))
        one = tf.one_hot(tf.argmax(chances, -1), EXPERTS, dtype=x.dtype)
        place = tf.reduce_sum((tf.cumsum(one, 1) - 1) * one, -1)
        dispatch = one[..., None] * tf.one_hot(tf.cast(place, tf.int32), TOKENS, dtype=x.dtype)[..., None, :]
        slots = tf.einsum("gtec,gtd->gecd", dispatch, x)
        hidden = tf.nn.relu(tf.einsum("gecd,edh->gech", slots, layers["into"]))
        applied = tf.einsum("gech,ehd->gecd", hidden, layers["out"])
        gate = tf.reduce_sum(chances * one, -1)[..., None]
        mixed = x + gate * tf.einsum("gtec,gecd->gtd", dispatch, applied)
        return cross_entropy(y, tf.matmul(tf.reduce_mean(mixed, 1), layers["head"]))

    return _program(setting, layers, loss, ("x", "y"), classifier_batch(setting, (TOKENS, FEATURES), CLASSES))


def margin(setting: Setting) -> Program:
    """A table's rows, and classes whose normalised weights' cosine has a margin (CosFace) at the label."""
    layers = Layers(setting.dtype, table=(CLASSES, FEATURES), w=(FEATURES, HIDDEN), classes=(HIDDEN, CLASSES))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        features = tf.tanh(tf.matmul(tf.reduce_sum(tf.gather(layers["table"], x), 1), layers["w"]))
        unit = tf.math.l2_normalize(features, -1), tf.math.l2_normalize(layers["classes"], 0)
        cosines = tf.matmul(*unit)
        at_label = tf.stack([tf.range(tf.shape(y)[0]), y], -1)
        lowered = tf.tensor_scatter_nd_sub(cosines, at_label, tf.fill(tf.shape(y), tf.cast(0.35, cosines.dtype)))
        return cross_entropy(y, 8.0 * lowered)

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": generator.integers(CLASSES, size=(BATCH, 3)).astype(np.int32),
            "y": generator.integers(CLASSES, size=BATCH).astype(np.int32),
        }

    return _program(setting, layers, loss, ("x", "y"), batch)


CASES = (Case("routed_experts", experts), Case("margin", margin))
