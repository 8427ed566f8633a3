"""Optimizers by name, with learning rates that move the weights of a tiny model visibly in four steps.

Epsilon is 1e-5: where a gradient is zero in exact arithmetic (a key's bias under softmax, a bias before batch
norm), Adam-like optimizers divide rounding noise by epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

EPSILON = 1e-5

_LEARNING_RATES = {"sgd": 0.1, "momentum": 0.05, "adagrad": 0.05, "ftrl": 0.05}


def learning_rate(name: str) -> float:
    """Learning rate of the named optimizer."""
    return _LEARNING_RATES.get(name, 0.01)


def keras_optimizer(name: str, rate: float) -> Any:
    """An optimizer of the Keras that this process has, with the given learning rate.

    Raises:
        KeyError: the name is unknown.
        AttributeError: this Keras has no such optimizer.
    """
    made = tf.keras.optimizers
    table: dict[str, Callable[[], Any]] = {
        "sgd": lambda: made.SGD(rate),
        "momentum": lambda: made.SGD(rate, momentum=0.9, nesterov=True),
        "adam": lambda: made.Adam(rate, epsilon=EPSILON),
        "amsgrad": lambda: made.Adam(rate, epsilon=EPSILON, amsgrad=True),
        "adamw": lambda: made.AdamW(rate, weight_decay=0.01, epsilon=EPSILON),
        "rmsprop": lambda: made.RMSprop(rate, momentum=0.5, centered=True, epsilon=EPSILON),
        "adagrad": lambda: made.Adagrad(rate, epsilon=EPSILON),
        "adafactor": lambda: made.Adafactor(rate),
        "lamb": lambda: made.Lamb(rate, epsilon=EPSILON),
        "ftrl": lambda: made.Ftrl(rate),
        "clipped": lambda: made.SGD(rate, global_clipnorm=0.05),
    }
    return table[name]()


def v1_optimizer(name: str) -> tf.compat.v1.train.Optimizer:
    """An optimizer of `tf.compat.v1.train`.

    Raises:
        KeyError: the name is unknown.
    """
    rate, made = learning_rate(name), tf.compat.v1.train
    table: dict[str, Callable[[], tf.compat.v1.train.Optimizer]] = {
        "sgd": lambda: made.GradientDescentOptimizer(rate),
        "momentum": lambda: made.MomentumOptimizer(rate, momentum=0.9),
        "adam": lambda: made.AdamOptimizer(rate, epsilon=EPSILON),
        "rmsprop": lambda: made.RMSPropOptimizer(rate, momentum=0.5, epsilon=EPSILON),
        "adagrad": lambda: made.AdagradOptimizer(rate),
        "ftrl": lambda: made.FtrlOptimizer(rate),
    }
    return table[name]()
