"""Plain `tf.Module` programs with updates written by hand: no Keras in the step. Control flow in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.zoo.case import BATCH, SEED, Case, Program, Setting, function_program
from tests.zoo.keras_step import classifier_batch, cross_entropy, dense_gradients
from tests.zoo.optimizers import EPSILON, learning_rate

FEATURES, WIDTH, CLASSES, WORDS = 10, 12, 4, 20


class Layers(tf.Module):
    """Weights by name, drawn from a NumPy generator."""

    def __init__(self, dtype: str, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = np.random.default_rng(SEED)
        self.weights = {
            name: tf.Variable(generator.normal(scale=0.4, size=shape), dtype=dtype, name=name)
            for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> tf.Variable:
        return self.weights[name]


class Updater(tf.Module):
    """Gradient descent, or Adam with bias correction from a step counter (Kingma and Ba 2015, algorithm 1)."""

    def __init__(self, name: str, variables: Sequence[tf.Variable]) -> None:
        super().__init__()
        self.kind = name
        self.count = tf.Variable(0, dtype=tf.int64, name="count")
        slots = 2 if name == "adam" else 0
        self.slots = [
            [tf.Variable(tf.zeros_like(variable), name=f"{variable.name[:-2]}_slot") for _ in range(slots)]
            for variable in variables
        ]

    def apply(self, gradients: Sequence[Any], variables: Sequence[tf.Variable]) -> None:
        rate = learning_rate(self.kind)
        count = self.count.assign_add(1)
        for gradient, variable, slots in zip(gradients, variables, self.slots, strict=True):
            if not slots:
                if isinstance(gradient, tf.IndexedSlices):
                    variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
                else:
                    variable.assign_sub(rate * gradient)
                continue
            gradient = tf.convert_to_tensor(gradient)
            exponent = tf.cast(count, gradient.dtype)
            first = slots[0].assign(0.9 * slots[0] + 0.1 * gradient) / (1 - 0.9**exponent)
            second = slots[1].assign(0.99 * slots[1] + 0.01 * tf.square(gradient)) / (1 - 0.99**exponent)
            variable.assign_sub(rate * first / (tf.sqrt(second) + EPSILON))


def _program(
    setting: Setting,
    layers: Layers,
    loss: Callable[..., tf.Tensor],
    inputs: Sequence[str],
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]],
) -> Program:
    trained = list(layers.weights.values())
    updater = Updater(setting.optimizer, trained)

    def step(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        with setting.scope(), tf.GradientTape() as tape:
            found = loss(layers, *values)
        gradients = tape.gradient(found, trained)
        updater.apply(gradients, trained)
        return {"loss": found} | dense_gradients(setting, gradients)

    def variables() -> list[tf.Variable]:
        return [*trained, *updater.variables]

    return function_program(setting, step, inputs, make_batch, variables, learning_rate(setting.optimizer))


def module(setting: Setting) -> Program:
    """Two dense layers; the step reads a variable again after writing it."""
    layers = Layers(setting.dtype, w1=(FEATURES, WIDTH), b1=(WIDTH,), w2=(WIDTH, CLASSES), b2=(CLASSES,))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.relu(tf.matmul(x, layers["w1"]) + layers["b1"])
        return cross_entropy(y, tf.matmul(hidden, layers["w2"]) + layers["b2"])

    return _program(setting, layers, loss, ("x", "y"), classifier_batch(setting, (FEATURES,), CLASSES))


def einsum(setting: Setting) -> Program:
    """Einsum with a shared core, transposed operands, softmax over a masked axis."""
    layers = Layers(setting.dtype, query=(6, 2, 5), key=(6, 2, 5), out=(2, 5, CLASSES))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        query = tf.einsum("bld,dhk->bhlk", x, layers["query"])
        key = tf.einsum("bld,dhk->bhlk", x, layers["key"])
        scores = tf.matmul(query, key, transpose_b=True) / 5**0.5
        mask = tf.linalg.band_part(tf.ones_like(scores[0, 0]), -1, 0)
        weights = tf.nn.softmax(scores - 1e3 * (1 - mask))
        mixed = tf.einsum("bhlm,bhmk->blhk", weights, key)
        return cross_entropy(y, tf.reduce_mean(tf.einsum("blhk,hkc->blc", mixed, layers["out"]), axis=1))

    return _program(setting, layers, loss, ("x", "y"), classifier_batch(setting, (7, 6), CLASSES))


def gather(setting: Setting) -> Program:
    """A table that is read by `tf.gather` and updated by `scatter_sub` of sparse gradients."""
    layers = Layers(setting.dtype, table=(WORDS, WIDTH), w=(WIDTH, CLASSES))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        pooled = tf.reduce_sum(tf.gather(layers["table"], x), axis=1)
        return cross_entropy(y, tf.matmul(tf.tanh(pooled), layers["w"]))

    def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "x": generator.integers(WORDS, size=(BATCH, 4)).astype(np.int32),
            "y": generator.integers(CLASSES, size=BATCH).astype(np.int32),
        }

    return _program(setting, layers, loss, ("x", "y"), batch)


def while_loop(setting: Setting) -> Program:
    """One layer applied in a loop: the gradient of its weight is summed in the loop's state."""
    layers = Layers(setting.dtype, enter=(FEATURES, WIDTH), core=(WIDTH, WIDTH), leave=(WIDTH, CLASSES))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def body(index: tf.Tensor, hidden: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return index + 1, tf.tanh(tf.matmul(hidden, layers["core"]))

        _, hidden = tf.while_loop(lambda index, _: index < 3, body, [tf.constant(0), tf.matmul(x, layers["enter"])])
        return cross_entropy(y, tf.matmul(hidden, layers["leave"]))

    return _program(setting, layers, loss, ("x", "y"), classifier_batch(setting, (FEATURES,), CLASSES))


def global_condition(setting: Setting) -> Program:
    """Branches chosen by a value of the whole batch: both ranks must take the same one."""
    layers = Layers(setting.dtype, w1=(FEATURES, WIDTH), w2=(WIDTH, CLASSES))

    def loss(layers: Layers, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        hidden = tf.matmul(x, layers["w1"])
        active = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(hidden), lambda: tf.tanh(hidden))
        found = cross_entropy(y, tf.matmul(active, layers["w2"]))
        return tf.cond(found > 1.5, lambda: 0.5 * found + 0.75, lambda: found)

    return _program(setting, layers, loss, ("x", "y"), classifier_batch(setting, (FEATURES,), CLASSES))


CASES = (
    Case("module", module),
    Case("einsum", einsum),
    Case("gather", gather),
    Case("while_loop", while_loop),
    Case("global_condition", global_condition),
)
