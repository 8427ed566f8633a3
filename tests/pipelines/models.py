"""Small models in stages, for TF2 and TF1: what a pipeline is compared with is the same model without scopes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, WIDTH, CLASSES, STEPS, RATE = 16, 6, 5, 3, 0.1
Scope = Callable[[], Any]
Results = dict[str, tf.Tensor]


def first_value(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(shape) * 0.4


def chain(stages: int) -> tuple[list[np.ndarray], Callable[..., Results]]:
    """Four layers in stages, with a skip connection past the middle ones and two losses."""
    weights = [first_value(i, WIDTH, WIDTH) for i in range(3)] + [first_value(3, WIDTH, CLASSES)]

    def forward(w: Sequence[Any], x: tf.Tensor, y: tf.Tensor, stage: Scope, split: Scope) -> Results:
        h, first, side = x, x, tf.constant(0.0, tf.float64)
        for group in np.array_split(np.arange(4), stages):
            with stage():
                for i in group:
                    with split() if i == 1 else contextlib.nullcontext():
                        h = tf.tanh(h @ w[i])
                    first = h if i == 0 else first
                    h = h + first if i == 2 else h
                    side = 0.1 * tf.reduce_mean(h**2) if i == 1 else side
        loss = tf.reduce_mean((h - y) ** 2)
        return {"loss": loss + side, "side": side, "rows": h}

    return weights, forward


def tied() -> tuple[list[np.ndarray], Callable[..., Results]]:
    """An embedding at the first stage, which the last one reads again to tell the classes apart."""

    def forward(w: Sequence[Any], x: tf.Tensor, y: tf.Tensor, stage: Scope, split: Scope) -> Results:
        tokens = tf.argmax(y, axis=1)
        table = tf.convert_to_tensor(w[0])
        with stage():
            h = tf.gather(table, tokens) + x
        with stage():
            h = tf.tanh(h @ w[1])
        with stage():
            logits = tf.matmul(h, table, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tokens, logits=logits))
        return {"loss": loss, "sum": tf.reduce_sum(h)}

    return [first_value(0, CLASSES, WIDTH), first_value(1, WIDTH, WIDTH)], forward


def towers(contrastive: bool = False) -> tuple[list[np.ndarray], Callable[..., Results]]:
    """Two towers side by side, joined row by row, or by a loss over all pairs of rows of the batch."""

    def forward(w: Sequence[Any], x: tf.Tensor, y: tf.Tensor, stage: Scope, split: Scope) -> Results:
        with stage():
            images = tf.tanh(x @ w[0])
        with stage():
            texts = tf.tanh(y @ w[1])
        with stage():
            if contrastive:
                near = tf.matmul(images @ w[2], texts, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.log_softmax(near) * -tf.eye(ROWS, dtype=tf.float64))
            else:
                near = tf.reduce_sum((images @ w[2]) * texts, axis=1)
                loss = tf.reduce_mean(tf.nn.softplus(-near))
        return {"loss": loss, "rows": near}

    return [first_value(0, WIDTH, 4), first_value(1, CLASSES, 4), first_value(2, 4, 4)], forward


MODELS = {
    "chain 2": lambda: chain(2),
    "chain 3": lambda: chain(3),
    "chain 4": lambda: chain(4),
    "tied": tied,
    "towers": towers,
    "contrastive": lambda: towers(contrastive=True),
}


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(number)
    return generator.standard_normal((ROWS, WIDTH)), generator.standard_normal((ROWS, CLASSES))


def in_turn(stage: Callable[..., Any], devices: Sequence[Sequence[int]]) -> Scope:
    """``stage`` on these ranks one after the other, as a program enters it."""
    order = itertools.cycle(devices)
    return (lambda: stage(devices=next(order))) if devices else stage


def trained_tf2(
    model: str, optimizer: str, stage: Scope, split: Scope, function: Callable[[Any], Any]
) -> tuple[dict[str, np.ndarray], Any]:
    """Every result, and every variable of the model and the optimizer, after some steps; and the step."""
    first, forward = MODELS[model]()
    weights = [tf.Variable(v, name=f"w{i}") for i, v in enumerate(first)]
    kinds = {"sgd": tf.keras.optimizers.SGD, "adam": tf.keras.optimizers.Adam}
    settings = {"epsilon": 1e-3} if optimizer == "adam" else {}
    updating = kinds[optimizer](RATE if optimizer == "sgd" else RATE / 10, **settings)
    updating.build(weights)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> Results:
        with tf.GradientTape() as tape:
            found = forward(weights, x, y, stage, split)
        updating.apply_gradients(zip(tape.gradient(found["loss"], weights), weights))
        return found

    values = {f"{i}/{k}": v.numpy() for i in range(STEPS) for k, v in step(*map(tf.constant, batch(i))).items()}
    variables = [*weights, *updating.variables]
    kept = {f"variable {i}": tf.convert_to_tensor(v).numpy() for i, v in enumerate(variables)}
    return values | kept, step


def trained_tf1(
    model: str, optimizer: str, stage: Scope, split: Scope, session: Callable[[tf.Graph], Any]
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """The same for a session: the fetches are there too, so that a caller can ask for their plan."""
    v1 = tf.compat.v1
    first, forward = MODELS[model]()
    with tf.Graph().as_default() as graph:
        x, y = (v1.placeholder(tf.float64, part.shape) for part in batch(0))
        weights = [v1.get_variable(f"w{i}", initializer=tf.constant(v), use_resource=True) for i, v in enumerate(first)]
        found = forward(weights, x, y, stage, split)
        kinds = {"sgd": v1.train.GradientDescentOptimizer, "adam": v1.train.AdamOptimizer}
        settings = {"epsilon": 1e-3} if optimizer == "adam" else {}
        update = kinds[optimizer](RATE if optimizer == "sgd" else RATE / 10, **settings).minimize(found["loss"])
        begin, variables = v1.global_variables_initializer(), v1.global_variables()
    with session(graph) as running:
        running.run(begin)
        values: dict[str, np.ndarray] = {}
        for i in range(STEPS):
            results, _ = running.run([found, update], dict(zip((x, y), batch(i))))
            values |= {f"{i}/{k}": np.asarray(v) for k, v in results.items()}
        values |= {f"variable {v.name}": value for v, value in zip(variables, running.run(variables))}
    return values, found
