"""Pieces of the scripts: layers in float64, and rows of which each replica reads its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

BATCH, WIDTH, CLASSES = 6, 12, 8


def dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
    """A layer of the type of its operand."""
    width = int(x.shape.as_list()[-1])
    start = np.random.default_rng(len(name) * units).normal(size=(width, units)) / np.sqrt(width)
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [width, units], x.dtype, tf.constant_initializer(start))
        bias = tf.get_variable("bias", [units], x.dtype, tf.zeros_initializer())
    y = tf.matmul(x, kernel) + bias
    return y if activation is None else activation(y)


def cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


class Rows:
    """The rows of a run.

    Args:
      replicas, turns: of the case; each replica reads batches of its own, ``turns`` of them for an update.
      mine: the replica that this process reads for; None: a process that computes everything alone.
    """

    def __init__(self, replicas: int, turns: int, updates: int, mine: int | None) -> None:
        self.replicas, self.turns, self.updates, self.mine = replicas, turns, updates, mine
        draw = np.random.default_rng(4)
        count = replicas * turns * updates * BATCH
        self.x = draw.normal(size=(count, WIDTH))
        self.y = draw.integers(0, CLASSES, size=count)
        # [update, replica, turn, row], as one device sees them
        self.order = np.arange(count).reshape(updates, replicas, turns * BATCH)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Features, labels, and how many of them are a batch."""
        if self.mine is None:
            return self.x, self.y, self.replicas * self.turns * BATCH
        order = self.order[:, self.mine].ravel()
        return self.x[order], self.y[order], BATCH

    def next(self, drop_remainder: bool = False) -> tuple[Any, Any]:
        x, y, rows = self.arrays()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows, drop_remainder=drop_remainder)
        iterator = tf.data.make_initializable_iterator(dataset)
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        return iterator.get_next()


def train(
    loss: Any, train_op: Any, runs: int, more: Any = (), hooks: Any = (), config: Any = None
) -> dict[str, list[float]]:
    """Losses of the runs, other values of them, and the weights after all."""
    found: dict[str, list[float]] = {"loss": []}
    with tf.train.MonitoredTrainingSession(hooks=list(hooks), config=config) as session:
        for _ in range(runs):
            values = session.run([loss, train_op, list(more)])
            found["loss"].append(float(values[0]))
            for number, value in enumerate(values[2]):
                found.setdefault(f"value {number}", []).extend(np.ravel(value).astype(float).tolist())
        weights = session.run({v.op.name: v for v in tf.trainable_variables()})
    found.update({name: np.ravel(value).tolist() for name, value in weights.items()})
    return found
