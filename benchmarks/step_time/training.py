"""A training step of a model under TensorFlow: plain, under Horovod, under Whale, or among several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.step_time.models import LEARNING_RATE, Workload


def make_step(
    workload: Workload,
    function: Callable[..., Any],
    tape: Callable[[Any], Any] = lambda tape: tape,
    rows: slice = slice(None),
    started: Callable[[Sequence[Any]], None] = lambda variables: None,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], float]:
    """A training step; each call runs one and returns its loss.

    Args:
        function: ``tf.function`` or what stands for it.
        tape: wraps the gradient tape (Horovod's does).
        rows: of the global batch that this process passes to the step.
        started: called with the variables before the first step.
        scope: what the model and its loss are called under.
    """
    model, optimizer = _built(workload)
    started([v.value for v in (*model.variables, *optimizer.variables)])
    weights = [v.value for v in model.trainable_variables]  # TensorFlow's variables: Horovod knows no Keras 3

    def step(y: tf.Tensor, *x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            with scope():
                loss = tf.reduce_mean(_losses(model, x, y))
        gradients = tape(recorded).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    wrapped, given = function(step), _batch(workload, rows)
    return lambda: float(wrapped(*given))


def make_mirrored_step(workload: Workload, rank: int, ranks: int) -> Callable[[], float]:
    """The same under ``tf.distribute.MultiWorkerMirroredStrategy``, for which Keras 2 is made."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = _built(workload)

    def of_one(y: tf.Tensor, *x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_mean(_losses(model, x, y)) / ranks  # gradients are added up
        optimizer.apply_gradients(zip(recorded.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    @tf.function
    def step(*given: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(of_one, args=given), axis=None)

    count = workload.batch // ranks
    given = _batch(workload, slice(rank * count, (rank + 1) * count))
    return lambda: float(step(*given))


def _built(workload: Workload) -> tuple[Any, Any]:
    tf.keras.utils.set_random_seed(1)
    tf.keras.mixed_precision.set_global_policy(workload.policy)
    model = workload.make(tf.keras)
    optimizer = getattr(tf.keras.optimizers, workload.optimizer)(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _losses(model: Any, x: Sequence[tf.Tensor], y: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(model(x[0] if len(x) == 1 else list(x), training=True), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


def _batch(workload: Workload, rows: slice) -> list[tf.Tensor]:
    """Labels, then features."""
    features, labels = workload.inputs(np.random.default_rng(0))
    return [tf.constant(values[rows]) for values in (labels, *features)]
